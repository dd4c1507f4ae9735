"""Names of DeepSpeed: the modules under which scripts import this package, and errors for names that it lacks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mpitrain.errors import InputError

# modules of DeepSpeed, by the module here that has their names
MODULES = {
    "accelerator": ("accelerator",),
    "checkpointing": ("checkpointing", "runtime.activation_checkpointing.checkpointing"),
    "comm": ("comm",),
    "engine": ("runtime.engine", "runtime.pipe.engine"),
    "moe": ("moe", "moe.utils", "moe.layer"),
    "pipe": ("pipe", "runtime.pipe", "runtime.pipe.module"),
    "utils": ("utils", "utils.logging", "runtime.utils", "runtime.dataloader"),
    "zero": ("zero", "runtime.zero", "runtime.zero.partition_parameters"),
}
# replacements of what is missing, by the beginning of its name
_INSTEAD = {
    "init_inference": "mt.load_model or python -m mpitrain.generate",
    "inference": "mt.load_model or python -m mpitrain.generate",
    "tp_model_init": "mt.initialize(plan=...)",
    "moe": "an mpitrain configuration, or experts in the model that every rank has",
    "ops": "a class of torch.optim, or optimizer.type of the configuration",
    "zero.register_external_parameter": "ZeRO stage 2, or a use of the parameter in its own module",
    "zero.TiledLinear": "model.tiled of an mpitrain configuration",
    "checkpointing": "torch.utils.checkpoint, which keeps random numbers itself",
    "sequence": "parallel.tensor with parallel.sequence of an mpitrain configuration",
    "runtime.pipe.topology": "num_stages= of PipelineModule",
    "runtime.lr_schedules": "scheduler of the configuration",
    "profiling": "monitor.timeline of an mpitrain configuration",
    "utils.zero_to_fp32": "python -m mpitrain.checkpoint export CHECKPOINT weights.pt",
}
_METHODS = {
    "no_sync": "gradient_accumulation_steps: only the last microbatch of a step is summed over ranks",
    "set_gradient_accumulation_boundary": "gradient_accumulation_steps",
    "set_train_batch_size": "a new engine with another configuration, which loads a checkpoint",
    "allreduce_gradients": "step, which sums gradients over ranks",
    "compile": "model.compile of an mpitrain configuration",
    "offload_states": "zero_optimization.offload_optimizer",
    "load_module_state_dict": "load_state_dict of the model before deepspeed.initialize",
}


class MissingName(InputError, AttributeError):
    """Error for a name of DeepSpeed that has no counterpart."""


class MissingModule(InputError, ImportError):
    """Error for a module of DeepSpeed that has no counterpart."""


def explain_missing(name: str) -> AttributeError:
    """Return the error for a name of the package that is missing: plain for a private name, else with a replacement."""
    if name.rpartition(".")[2].startswith("_"):
        return AttributeError(f"module 'mpitrain.deepspeed' has no attribute {name!r}")
    return MissingName(_explain(f"deepspeed.{name}", name), agreed=True)


def explain_missing_method(kind: str, name: str) -> AttributeError:
    """Return the error for an attribute of an engine that is missing.

    Args:
        kind: Name of the engine's class.
        name: Name of the attribute.
    """
    if name not in _METHODS:
        return AttributeError(f"{kind!r} object has no attribute {name!r}, and neither has its module")
    return MissingName(f"{kind} has no {name}; use {_METHODS[name]}", agreed=True)


def _explain(full: str, name: str) -> str:
    fitting = [text for begin, text in _INSTEAD.items() if name == begin or name.startswith(f"{begin}.")]
    instead = f"use {fitting[0]}" if fitting else "docs/deepspeed.md lists what there is"
    return f"mpitrain has no {full}; {instead}"


class _Refusals(MetaPathFinder):
    """Finder that explains modules of DeepSpeed that are missing, in place of Python's own error."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("deepspeed."):
            raise MissingModule(_explain(fullname, fullname.partition(".")[2]), agreed=True)
        return None


def install(package: str) -> ModuleType:
    """Let `import deepspeed` and its modules import a package that has them, and return it.

    Args:
        package: Name of the package.
    """
    root = sys.modules["deepspeed"] = import_module(package)
    for ours, theirs in MODULES.items():
        for path in theirs:
            _place(root, path, import_module(f"{package}.{ours}"))
    sys.meta_path.insert(0, _Refusals())
    return root


def _place(root: ModuleType, path: str, module: ModuleType) -> None:
    """Register a module as deepspeed.PATH, with empty packages on the way."""
    parent: Any = root
    *above, last = path.split(".")
    for number, name in enumerate(above, 1):
        full = f"deepspeed.{'.'.join(above[:number])}"
        if full not in sys.modules:
            sys.modules[full] = ModuleType(full)
            setattr(parent, name, sys.modules[full])
        parent = sys.modules[full]
    sys.modules[f"deepspeed.{path}"] = module
    setattr(parent, last, module)
