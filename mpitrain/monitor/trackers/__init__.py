"""Other tools that the figures of a run go to as well: TensorBoard, Weights & Biases, MLflow, or one of one's own."""

from mpitrain.monitor.trackers.base import Tracker
from mpitrain.monitor.trackers.tracking import Tracking, asked_for

__all__ = ["Tracker", "Tracking", "asked_for"]
