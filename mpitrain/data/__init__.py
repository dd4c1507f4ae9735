"""Data sets: sharded HDF5 folders made from a user's own input, read at random in bounded memory.

`format.py` says what lies in a folder, `prepare.py` makes one, `dataset.py` reads it, in batches in the order of
`order.py`.
"""

from mpitrain.data.dataset import Batch, Dataset, Description, Loader, Share, evaluation_batches, open_dataset
from mpitrain.data.folders import resolve, stage_on_nodes, staged_folder
from mpitrain.data.format import read_manifest
from mpitrain.data.mix import open_mix
from mpitrain.data.order import Ordering, SampleOrder

__all__ = ["Batch", "Dataset", "Description", "Loader", "SampleOrder", "Share", "evaluation_batches", "open_dataset"]
__all__ += ["Ordering", "open_mix", "read_manifest", "resolve", "stage_on_nodes", "staged_folder"]
