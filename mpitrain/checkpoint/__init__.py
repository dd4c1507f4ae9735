"""Sharded checkpoints: every rank writes its slices, any layout reads them back. Loads no MPI."""

from mpitrain.checkpoint.files import Part
from mpitrain.checkpoint.manifest import FRUITLESS, MASTER, MODEL, Manifest, TensorSpec
from mpitrain.checkpoint.store import Store

__all__ = ["FRUITLESS", "MASTER", "MODEL", "Manifest", "Part", "Store", "TensorSpec"]
