"""Data sets: folders of HDF5 shards made from the user's input, with random reads in bounded memory.

`format.py` describes the content of a folder, `prepare.py` makes one, and `dataset.py` reads it, in batches whose order
is defined by `order.py`.
"""

from mpitrain.data.dataset import Batch, Dataset, Description, Loader, Share, evaluation_batches, open_dataset
from mpitrain.data.folders import resolve, stage_on_nodes, staged_folder
from mpitrain.data.format import read_manifest
from mpitrain.data.mix import open_mix
from mpitrain.data.order import Ordering, SampleOrder

__all__ = ["Batch", "Dataset", "Description", "Loader", "SampleOrder", "Share", "evaluation_batches", "open_dataset"]
__all__ += ["Ordering", "open_mix", "read_manifest", "resolve", "stage_on_nodes", "staged_folder"]
