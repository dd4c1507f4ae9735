"""Monitoring of a run: progress, metrics, logs, memory. This package takes plain values and does not use MPI."""

from mpitrain.monitor.logs import open_rank_log
from mpitrain.monitor.memory import memory_bytes, peak_memory_bytes
from mpitrain.monitor.progress import Progress
from mpitrain.monitor.run_files import EventLog, MetricsWriter, read_events, read_goodput, read_metrics

__all__ = ["EventLog", "MetricsWriter", "Progress", "memory_bytes", "open_rank_log", "peak_memory_bytes"]
__all__ += ["read_events", "read_goodput", "read_metrics"]
