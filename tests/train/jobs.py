"""The main job inside a process group that exists already."""

from __future__ import annotations

from mpitrain.config.settings import Config
from mpitrain.monitor import read_metrics
from mpitrain.train import train
from mpitrain.trainer.run import Run


def run(comm, folder, /, **sections):
    """Train with a configuration; returns the lines of metrics.jsonl."""
    config = Config.from_dict({"run": {"dir": str(folder)}} | sections)
    comm.barrier()
    with Run(config, comm) as job:
        assert train(config, comm, job) == 0
    comm.barrier()
    return read_metrics(folder)
