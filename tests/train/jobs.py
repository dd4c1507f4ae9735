"""Training by the main job inside an existing process group."""

from __future__ import annotations

from mpitrain.config.settings import Config
from mpitrain.monitor import read_metrics
from mpitrain.trainer.trainer import Trainer

HELD_OUT = 7  # samples that a run is evaluated with, unless a test says how many; no number of ranks divides them


def run(comm, folder, /, **sections):
    """Train with a configuration and return the lines of metrics.jsonl."""
    train = {"evaluate_samples": HELD_OUT} | sections.get("train", {})
    config = Config.from_dict({"run": {"dir": str(folder)}} | sections | {"train": train})
    comm.barrier()
    trainer = Trainer(config, world=comm)
    with trainer.working():  # without `fit`, which would set threads and the time limit of this whole process
        assert trainer.train() == 0
    comm.barrier()
    return read_metrics(folder)
