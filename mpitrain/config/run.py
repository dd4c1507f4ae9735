"""Settings of everything around the training: run folder, data, checkpoints, failures and monitoring."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, model_validator

from mpitrain.choices import Augmentation
from mpitrain.config.named import suggestion
from mpitrain.config.section import Named, Section, followed_apart, setting


class RunSection(Section):
    """Settings of [run]: folder, seed, device and time limit of the run."""

    dir: str = setting(
        "", "run folder; empty: runs/<date>-<time>, or runs/job-<id> in a batch job", also=["output_dir", "folder"]
    )
    seed: int = setting(1, "seed of weights, sample order and dropout", ge=0, lt=2**63)
    reproducible: bool = setting(
        False, "give the same bits on any power-of-two number of ranks (slower)", also=["deterministic"], decisive=True
    )
    device: str = followed_apart(
        "auto",
        "device that each rank computes on: cpu, or a kind of accelerator as PyTorch names it (cuda, also for "
        "ROCm; xpu ...); auto: an accelerator if there is one",
        pattern=r"^[a-z]+[a-z0-9_]*$",
    )
    stop_before: float = setting(120.0, "seconds before the end of the batch job at which to save and stop", ge=0.0)
    workers: int = setting(8, "with run.reproducible: number of virtual workers over which a batch is summed", ge=1)


def _check_augment(names: Any) -> Any:
    known = get_args(Augmentation)
    for name in names if isinstance(names, (list, tuple)) else ():
        if isinstance(name, str) and ":" not in name and name not in known:
            hint = suggestion(name, known, f"choose {', '.join(known)}, or package.module:function")
            raise ValueError(f"data.augment: unknown augmentation {name!r}; {hint}")
    return names


class DataSection(Section):
    """Settings of [data]: the training data and how it is read."""

    path: str = setting("", "data set folder, or `digits`; empty: the source code of Python as bytes", also=["dataset"])
    mix: dict[str, Annotated[float, Gt(0), AllowInfNan(False)]] = setting(
        {}, "instead of data.path: several data sets, each with its weight", also=["datasets", "data_weights", "blend"]
    )
    factory: str = setting(
        "",
        "instead of data.path: your own torch Dataset or IterableDataset as package.module:function, which is called "
        "as function(split, **data.options)",
        also=["dataset_class", "dataset_fn"],
    )
    options: dict[str, Any] = setting({}, "keyword arguments for data.factory")
    documents: Literal["joined", "apart"] = setting(
        "joined",
        "apart: a token attends only to its own document if a sample contains several",
        also=["reset_attention_mask", "document_masking"],
    )
    workers: int = setting(1, "reader threads per rank; 0 reads in the training thread", ge=0, also=["num_workers"])
    stage: str = setting("", "folder on each node's local disk to which the data set is copied first; empty: no copy")
    augment: Annotated[tuple[Named | Augmentation, ...], BeforeValidator(_check_augment)] = setting(
        (),
        'random changes of training images: "crop" moves them by some pixels, "flip" mirrors half of them; or your own '
        'as "package.module:function", called as function(x, y, generator) for each sample',
        also=["augmentation", "transforms", "random_crop", "random_flip"],
    )
    augment_padding: int = setting(
        4, "with crop: largest number of pixels by which an image is moved", ge=1, also=["padding"]
    )
    record_ids: bool = setting(False, "write each step's sample ids into metrics.jsonl")

    @model_validator(mode="after")
    def _check_one_source(self) -> DataSection:
        if self.path and self.mix:
            raise ValueError("data.path and data.mix are both set; add the path to data.mix, and remove data.path")
        if self.factory and (other := "path" if self.path else "mix" if self.mix else "stage" if self.stage else ""):
            raise ValueError(f"data.factory and data.{other} are both set; remove one of them")
        if self.options and not self.factory:
            raise ValueError(f"data.options {sorted(self.options)} are for data.factory, which is not set; remove them")
        return self


class CheckpointSection(Section):
    """Settings of [checkpoint]: when and where checkpoints are saved, and which are kept."""

    every: Annotated[int, Ge(0)] | Literal["auto"] = setting(
        100,
        "steps between checkpoints; 0: only at the end; auto: the interval at which saves and failures "
        "together cost the least time",
        also=["save_every", "save_interval", "interval"],
        off=0,
    )
    # Half a year. 2,048 nodes of eight GPUs had 419 unexpected interruptions in 54 days, one per node in 6,300 hours
    # (Grattafiori et al. 2024, The Llama 3 herd of models, section 3.3.4). Nodes without GPUs fail less often, but
    # saving too often does less harm than saving too rarely.
    node_mtbf: float = setting(
        4380.0, "with checkpoint.every auto: hours between two failures of one node, on average", gt=0.0, also=["mtbf"]
    )
    keep: int = setting(2, "number of newest checkpoints to keep", ge=1, also=["save_total_limit"])
    best: str = setting(
        "",
        "held_out_loss or a metric: also save after each evaluation in which it is the best so far, and keep "
        "that checkpoint",
        also=["save_best", "save_best_only", "load_best_model_at_end"],
    )
    resume: str = setting(
        "auto", "auto: resume from the newest complete checkpoint in the run folder; never; or the PATH of a checkpoint"
    )
    background: bool = setting(
        False, "write checkpoints in a thread while training continues", also=["async", "async_save"]
    )
    files: Literal["rank", "node"] = setting("rank", "one file per rank, or one per node")
    local: str = setting("", "folder on a node-local disk for checkpoints; empty: none")
    redundancy: Literal["none", "partner", "xor"] = setting(
        "none", "with checkpoint.local: redundancy from which the part of a lost node is rebuilt"
    )
    flush_every: int = setting(10, "with checkpoint.local: write every K-th checkpoint into the run folder too", ge=1)


class ElasticSection(Section):
    """Settings of [elastic]: reaction to ranks that fail."""

    mode: Literal["off", "shrink"] = setting(
        "off", "shrink: continue without ranks that failed (needs ULFM)", off="off"
    )
    copy_every: int = setting(1, "steps between copies of each rank's state to the memory of another rank", ge=1)


def timeline_steps(value: str) -> tuple[int, int]:
    """Return the first and the last step of a monitor.timeline `A:B`; (0, 0) if the text has another form."""
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", value)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _check_timeline(value: str) -> str:
    if value:
        first, last = timeline_steps(value)
        if not 1 <= first <= last:
            raise ValueError(
                f"monitor.timeline {value!r} is not A:B with 1 <= A <= B; give the first and the last step to "
                "record, such as 10:12"
            )
    return value


class MonitorSection(Section):
    """Settings of [monitor]: progress lines, trackers and the timeline."""

    tensorboard: bool = setting(False, "also write TensorBoard events into the run folder")
    wandb: bool = setting(
        False, "also log to Weights & Biases: into RUN/wandb, for `wandb sync`, unless WANDB_MODE is set"
    )
    mlflow: bool = setting(False, "also log to MLflow: files in RUN/mlflow, unless MLFLOW_TRACKING_URI is set")
    tracker: Named | Literal[""] = setting(
        "", "also log to your own tracker, as package.module:Class (a mpitrain.monitor.trackers.Tracker)"
    )
    project: str = setting("mpitrain", "project in W&B and experiment in MLflow", also=["wandb_project"])
    name: str = setting("", "name of the run in W&B and MLflow; empty: the name of the run folder", also=["run_name"])
    timeline: Annotated[str, AfterValidator(_check_timeline)] = setting(
        "",
        "A:B: record what every rank computes and communicates in steps A to B, as a trace and a picture; empty: off",
        also=["profile"],
    )
    every: int = setting(10, "steps between plain progress lines", ge=1, also=["log_every", "log_interval"])
