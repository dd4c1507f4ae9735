"""What options of `prepare` choose among, for the command line, which imports nothing that it may not need."""

from typing import Literal

Missing = Literal["mean", "median", "zero", "drop"]
Categories = Literal["onehot", "codes"]
Scale = Literal["standard"]
