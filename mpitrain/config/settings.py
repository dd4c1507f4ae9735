"""One validated configuration: a TOML file, then `--section.key value` arguments over it.

Every key is declared here with its type, its default and a sentence for `--help`. An unknown key is an
error that suggests the nearest name; nothing is ignored in silence. A `Config` never changes once made.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mpitrain.errors import InputError
from mpitrain.storage.disk import read_plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class RunSection(Section):
    dir: str = Field("", description="run folder; empty: runs/<date>-<time>, or runs/job-<id> in a batch job")
    seed: int = Field(1, ge=0, lt=2**63, description="seed of weights, sample order and dropout")
    reproducible: bool = Field(False, description="the same bits at any power-of-two number of ranks (slower)")
    stop_before: float = Field(120.0, ge=0.0, description="seconds before the batch job's end to save and stop")
    workers: int = Field(8, ge=1, description="with run.reproducible: virtual workers the batch is summed over")


class DataSection(Section):
    path: str = Field("", description="data set folder, or `digits`; empty: Python's own source as bytes")
    workers: int = Field(1, ge=0, description="reader threads per rank; 0 reads in the training thread")
    stage: str = Field("", description="folder on each node's own disk to copy the data set to first; empty: none")
    record_ids: bool = Field(False, description="write each step's sample ids into metrics.jsonl")


class ModelSection(Section):
    name: Literal["gpt", "resnet", "mlp"] = Field("gpt", description="a model of mpitrain.models")
    factory: str = Field("", description="package.module:function of your own model, instead of model.name")
    layers: int = Field(2, ge=1, description="blocks (gpt), hidden layers (mlp) or 18|34|50|101 (resnet)")
    width: int = Field(128, ge=1, description="features per token (gpt), per layer (mlp), of the stem (resnet)")
    heads: int = Field(4, ge=1, description="attention heads (gpt)")
    sequence: int = Field(128, ge=1, description="tokens per sample")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout probability (gpt, mlp)")
    options: dict[str, Any] = Field({}, description="further keyword arguments for model.factory")


class TrainSection(Section):
    steps: int = Field(300, ge=0, description="optimizer steps in the whole run")
    batch: int = Field(32, ge=1, description="global batch in samples, whatever the number of ranks")
    microbatch: int = Field(0, ge=0, description="samples per rank and forward pass; 0: the rank's whole share")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="precision of forward and backward")
    clip: float = Field(1.0, ge=0.0, description="largest global gradient norm; 0: no clipping")
    recompute: bool = Field(False, description="recompute block activations in backward instead of keeping them")
    evaluate_every: int = Field(100, ge=0, description="steps between evaluations on held-out data; 0: at the end")
    evaluate_samples: int = Field(256, ge=1, description="held-out samples per evaluation, at most")


class OptimSection(Section):
    name: str = Field("adamw", description="adamw, sgd or any class of torch.optim")
    lr: float = Field(2e-3, gt=0.0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="decay after the warm-up")
    warmup: int = Field(20, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.01, ge=0.0, description="weight decay of tensors of two or more dimensions")
    options: dict[str, Any] = Field({}, description="further keyword arguments of the torch optimizer")


class ParallelSection(Section):
    data: int | Literal["auto"] = Field("auto", description="data-parallel ranks; auto: what is left")
    pipeline: int = Field(1, ge=1, description="pipeline stages")
    tensor: int = Field(1, ge=1, description="tensor-parallel ranks (inside a node)")
    zero: Literal[0, 1, 2, 3] = Field(
        0,
        description="0 DDP; 1 + optimizer states, 2 + gradients, 3 + parameters sharded (in a pipeline, gradients are "
        "whole until the step's end)",
    )
    share_node: bool = Field(True, description="zero 1-3: one copy of the parameters for the ranks of a node")
    shard_within: Literal["all", "node"] = Field(
        "all", description="cut shares over all ranks, or inside each node and replicate them over the nodes"
    )
    reshard: bool = Field(True, description="zero 3 without share_node: free a block between forward and backward")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field("1f1b", description="pipeline schedule")
    cut: Literal["uniform", "parameters", "time"] = Field(
        "uniform", description="what stages have equally much of: blocks, parameters or measured time"
    )
    slices: int = Field(1, ge=1, description="pieces of each sequence that go through the pipeline by themselves")
    sequence: bool = Field(False, description="with tensor: cut activations along the sequence between the layers")
    chunks: int = Field(1, ge=1, description="model chunks per pipeline rank (interleaved)")
    recording: str = Field("", description="file for when each pipeline step ran, in the third training step")
    offload: str = Field("", description="optimizer states in `host` memory or in a memory-mapped file under a PATH")


class CommSection(Section):
    algorithm: Literal["auto", "mpi", "ring", "tree", "halving", "shared", "two_level"] = Field(
        "auto", description="all-reduce algorithm"
    )
    bucket_mb: float = Field(
        25.0, gt=0.0, description="gradient bucket size in MiB; at parallel.zero 2 and 3 at most 4 on one busy node"
    )
    compression: Literal["none", "fp16", "bf16", "topk", "powersgd"] = Field(
        "none", description="gradient compression on the wire"
    )
    timeout: float = Field(600.0, gt=0.0, description="seconds before an unfinished operation ends the job")


class CheckpointSection(Section):
    every: int = Field(100, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    resume: str = Field("auto", description="auto: from the newest whole one in the run folder; never; or a PATH")
    background: bool = Field(False, description="write from a thread while training goes on")
    files: Literal["rank", "node"] = Field("rank", description="one file per rank, or one per node")
    local: str = Field("", description="folder on a node-local disk for checkpoints; empty: none")
    redundancy: Literal["none", "partner", "xor"] = Field(
        "none", description="with checkpoint.local: what a lost node's part is rebuilt from"
    )
    flush_every: int = Field(10, ge=1, description="with checkpoint.local: every K-th one also into the run folder")


class ElasticSection(Section):
    mode: Literal["off", "shrink"] = Field("off", description="shrink: go on without ranks that died (needs ULFM)")
    copy_every: int = Field(1, ge=1, description="steps between the copies of each rank's state in others' memory")


class MonitorSection(Section):
    tensorboard: bool = Field(False, description="also write TensorBoard events into the run folder")
    timeline: bool = Field(False, description="write a timeline of compute and communication per rank")
    every: int = Field(10, ge=1, description="steps between plain progress lines")


class Config(Section):
    """The whole configuration of a run. Attributes are the TOML sections."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    monitor: MonitorSection = MonitorSection()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.model.name == "gpt" and not self.model.factory and self.model.width % self.model.heads:
            raise ValueError(
                f"model.width {self.model.width} is not a multiple of model.heads {self.model.heads}; "
                f"set model.width to {-(-self.model.width // self.model.heads) * self.model.heads}"
            )
        if self.model.name == "resnet" and not self.model.factory and self.model.layers not in (18, 34, 50, 101):
            raise ValueError(f"model.layers {self.model.layers}: a resnet has 18, 34, 50 or 101; set one of these")
        return self

    @staticmethod
    def from_dict(values: Mapping[str, Any], origin: str = "config") -> Config:
        """Validate nested values ({"train": {"steps": 10}}). Raises InputError naming the key and the mend."""
        _check_names(values, origin)
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            raise InputError(_first_problem(error, origin), agreed=True) from None

    @staticmethod
    def from_args(argv: Sequence[str]) -> Config:
        """`[FILE.toml] [--section.key value | --section.key=value]…`; later arguments win."""
        values, origin = {}, "command line"
        rest = list(argv)
        if rest and not rest[0].startswith("-"):
            origin = rest.pop(0)
            values = read_toml(origin)
            _check_names(values, origin)
        _merge(values, _parse_overrides(rest))
        return Config.from_dict(values, origin)

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(self.model_dump())


def start_timeout(argv: Sequence[str]) -> float:
    """The `comm.timeout` of a command line, in seconds; 0 for one that is wrong, which rank 0 tells later."""
    try:
        return Config.from_args(argv).comm.timeout
    except InputError:
        return 0.0


def read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_plain(Path(path)).decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"config file {path} does not exist; give an existing TOML file", agreed=True) from None
    except OSError as error:
        raise InputError(
            f"config file {path} cannot be read ({error.strerror}); give a TOML file", agreed=True
        ) from None
    except RecursionError:
        raise InputError(f"config file {path} is nested too deeply; give a TOML file", agreed=True) from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, numbers of thousands of digits
        raise InputError(f"config file {path} is not TOML: {error}", agreed=True) from None


def key_names() -> list[str]:
    """Every configuration key, as section.key."""
    return [f"{section}.{key}" for section, fields in _sections().items() for key in fields]


def help_text(program: str) -> str:
    """What --help prints: usage and every key with its default and meaning."""
    lines = [f"usage: mpirun -n N python -m {program} [CONFIG.toml] [--section.key value]...", "", "keys:"]
    for section, fields in _sections().items():
        for key, field in fields.items():
            default = json.dumps(field.default)
            lines.append(f"  --{section + '.' + key:24} {field.description} [{default}]")
    return "\n".join(lines)


def _sections() -> dict[str, dict[str, Any]]:
    return {name: field.annotation.model_fields for name, field in Config.model_fields.items()}  # type: ignore[union-attr]


def _parse_overrides(args: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while args:
        word = args.pop(0)
        if not word.startswith("--"):
            raise InputError(f"argument {word!r} is not understood; write --section.key value", agreed=True)
        name, equals, text = word[2:].partition("=")
        if "." not in name:
            raise InputError(_unknown(name, "command line"), agreed=True)
        if not equals:
            if not args:
                raise InputError(f"--{name} has no value; write --{name} VALUE", agreed=True)
            text = args.pop(0)
        section, _, key = name.partition(".")
        _check_names({section: {key: None}}, "command line")
        values.setdefault(section, {})[key] = _value(text, _sections()[section][key].annotation)
    return values


def _value(text: str, annotation: Any) -> Any:
    """The TOML value the text spells (3, 0.1, true, {a=1}), else, or where text is wanted, the text itself."""
    if annotation is str:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for section, keys in over.items():
        base.setdefault(section, {}).update(keys)


def _check_names(values: Mapping[str, Any], origin: str) -> None:
    known = _sections()
    for section, keys in values.items():
        if section not in known:
            raise InputError(_unknown(section, origin), agreed=True)
        if not isinstance(keys, Mapping):
            raise InputError(f"{origin}: {section} is a section; write [{section}] and its keys", agreed=True)
        for key in keys:
            if key not in known[section]:
                raise InputError(_unknown(f"{section}.{key}", origin), agreed=True)


def _unknown(name: str, origin: str) -> str:
    names = key_names()
    candidates = names if "." in name else sorted(_sections()) + [n.partition(".")[2] for n in names]
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.0 if "." in name else 0.5)
    found = near[0] if near else "--help for the list"
    if near and "." not in name and found not in _sections():
        found = next(full for full in names if full.endswith("." + found))
    return (
        f"{origin}: unknown key {name!r}; did you mean {found!r}?"
        if near
        else f"{origin}: unknown key {name!r}; see {found}"
    )


def _first_problem(error: ValidationError, origin: str) -> str:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"][:2])
    if not name:  # a check across keys, which names them itself
        return f"{origin}: {problem['msg'].removeprefix('Value error, ')}"
    return f"{origin}: {name} = {problem['input']!r:.200} is wrong: {problem['msg'].lower()}"
