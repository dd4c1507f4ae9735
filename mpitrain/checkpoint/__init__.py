"""Sharded checkpoints: every rank writes its slices, and any layout can read them. Importing this does not load MPI."""

from mpitrain.checkpoint.files import Part
from mpitrain.checkpoint.manifest import FRUITLESS, MASTER, MODEL, Manifest, TensorSpec
from mpitrain.checkpoint.store import Store

__all__ = ["FRUITLESS", "MASTER", "MODEL", "Manifest", "Part", "Store", "TensorSpec"]
