"""Settings of what surrounds the training: the run folder, the data, checkpoints, failures, what is shown."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from mpitrain.config.section import Section, setting


class RunSection(Section):
    """[run]"""

    dir: str = setting(
        "", "run folder; empty: runs/<date>-<time>, or runs/job-<id> in a batch job", also=["output_dir", "folder"]
    )
    seed: int = setting(1, "seed of weights, sample order and dropout", ge=0, lt=2**63)
    reproducible: bool = setting(
        False, "the same bits at any power-of-two number of ranks (slower)", also=["deterministic"]
    )
    device: str = setting(
        "auto",
        "what each rank computes on: cpu, or a kind of accelerator as PyTorch names it (cuda, also for ROCm; xpu ...); "
        "auto: what is there",
        pattern=r"^[a-z]+[a-z0-9_]*$",
    )
    stop_before: float = setting(120.0, "seconds before the batch job's end to save and stop", ge=0.0)
    workers: int = setting(8, "with run.reproducible: virtual workers the batch is summed over", ge=1)


class DataSection(Section):
    """[data]"""

    path: str = setting("", "data set folder, or `digits`; empty: Python's own source as bytes", also=["dataset"])
    workers: int = setting(1, "reader threads per rank; 0 reads in the training thread", ge=0, also=["num_workers"])
    stage: str = setting("", "folder on each node's own disk to copy the data set to first; empty: none")
    record_ids: bool = setting(False, "write each step's sample ids into metrics.jsonl")


class CheckpointSection(Section):
    """[checkpoint]"""

    every: Annotated[int, Ge(0)] | Literal["auto"] = setting(
        100,
        "steps between checkpoints; 0: only at the end; auto: as many as cost least time, saves and failures together",
        also=["save_every", "save_interval", "interval"],
    )
    # Half a year. 2,048 nodes of eight GPUs stopped 419 times unforeseen in 54 days (Grattafiori et al. 2024, The Llama
    # 3 herd of models, section 3.3.4): each once in 6,300 hours. Nodes without GPUs fail less; rather too often saved.
    node_mtbf: float = setting(
        4380.0, "with checkpoint.every auto: hours between two failures of one node, on average", gt=0.0, also=["mtbf"]
    )
    keep: int = setting(2, "newest checkpoints kept", ge=1, also=["save_total_limit"])
    resume: str = setting("auto", "auto: from the newest whole one in the run folder; never; or a PATH")
    background: bool = setting(False, "write from a thread while training goes on", also=["async", "async_save"])
    files: Literal["rank", "node"] = setting("rank", "one file per rank, or one per node")
    local: str = setting("", "folder on a node-local disk for checkpoints; empty: none")
    redundancy: Literal["none", "partner", "xor"] = setting(
        "none", "with checkpoint.local: what a lost node's part is rebuilt from"
    )
    flush_every: int = setting(10, "with checkpoint.local: every K-th one also into the run folder", ge=1)


class ElasticSection(Section):
    """[elastic]"""

    mode: Literal["off", "shrink"] = setting("off", "shrink: go on without ranks that died (needs ULFM)")
    copy_every: int = setting(1, "steps between the copies of each rank's state in others' memory", ge=1)


class MonitorSection(Section):
    """[monitor]"""

    tensorboard: bool = setting(False, "also write TensorBoard events into the run folder")
    timeline: bool = setting(False, "write a timeline of compute and communication per rank", also=["profile"])
    every: int = setting(10, "steps between plain progress lines", ge=1, also=["log_every", "log_interval"])
