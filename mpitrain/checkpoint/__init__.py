"""Sharded checkpoints: every rank writes its slices, and any layout can read them. Importing this does not load MPI."""

from mpitrain.checkpoint.files import Part
from mpitrain.checkpoint.manifest import MASTER, MODEL, NON_FINITE_SINCE, Manifest, TensorSpec
from mpitrain.checkpoint.store import Store

__all__ = ["MASTER", "MODEL", "NON_FINITE_SINCE", "Manifest", "Part", "Store", "TensorSpec"]
