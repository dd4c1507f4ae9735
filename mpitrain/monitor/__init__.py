"""What a person sees of a run: banner, progress, metrics, logs, memory. Takes plain values and knows no MPI."""

from mpitrain.monitor.banner import Outcome, RunFacts, banner, closing
from mpitrain.monitor.events import EventLog, read_events
from mpitrain.monitor.logs import open_rank_log
from mpitrain.monitor.memory import memory_bytes, peak_memory_bytes
from mpitrain.monitor.metrics import MetricsWriter, read_metrics
from mpitrain.monitor.progress import Progress

__all__ = ["EventLog", "MetricsWriter", "Outcome", "Progress", "RunFacts", "banner", "closing", "memory_bytes"]
__all__ += ["open_rank_log", "peak_memory_bytes", "read_events", "read_metrics"]
