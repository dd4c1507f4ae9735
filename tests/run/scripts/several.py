"""Runs the scripts named in its arguments, one after another, in one process or on the ranks of one job."""

import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

for name in sys.argv[1:]:
    print(f"== {name}")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
