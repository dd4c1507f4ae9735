"""Sharded checkpoints: every rank writes its slices, any layout reads them back."""

from mpitrain.checkpoint.files import Part
from mpitrain.checkpoint.manifest import Manifest, TensorSpec
from mpitrain.checkpoint.store import Store

__all__ = ["Manifest", "Part", "Store", "TensorSpec"]
