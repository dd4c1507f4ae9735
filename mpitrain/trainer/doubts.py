"""Settings that can be carried out but are hardly meant, each told in a line at the start of a run."""

from __future__ import annotations

import math
import re

from mpitrain.config.batch_sizes import BatchSizes
from mpitrain.config.learning_rate import DECAYS
from mpitrain.config.settings import Config
from mpitrain.storage import proc

# what /proc/cpuinfo calls instructions that multiply matrices of 16-bit numbers, on x86 and on Arm
_FAST = {"bf16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}


def doubts(config: Config, *, columns: int, on_cpu: bool, flags: frozenset[str] | None = None) -> list[str]:
    """What is doubtful, a line each.

    Args:
        config: The settings.
        columns: Data-parallel ranks of a group.
        on_cpu: Whether ranks compute on the CPU.
        flags: What the CPU can do; None: as the system says.
    """
    train, optim, found = config.train, config.optim, []
    flags = cpu_flags() if flags is None else flags
    if on_cpu and train.precision in _FAST and flags and not flags & _FAST[train.precision]:
        found.append(
            f"train.precision {train.precision} is slower than fp32 on this CPU, which has no instructions for it; "
            "it saves memory alone"
        )
    warmup = optim.warmup if optim.schedule in DECAYS else 0
    if warmup >= train.steps > 0:
        found.append(
            f"optim.warmup {warmup} takes all of train.steps {train.steps}: optim.lr is hardly reached; lower it"
        )
    elif optim.schedule == "wsd":
        decay = optim.decay_steps if optim.decay_steps >= 1 else math.ceil(optim.decay_steps * train.steps)
        if warmup + decay > train.steps:
            found.append(
                f"optim.warmup {warmup} and optim.decay_steps {decay:g} are more than train.steps {train.steps}"
            )
    if optim.lr_end > optim.lr:
        found.append(f"optim.lr_end {optim.lr_end:g} is above optim.lr {optim.lr:g}: the rate rises to the end")
    sizes = BatchSizes.of(train)
    least = min(sizes.after(0))
    if least < columns:
        found.append(f"{sizes.key(least)} {least} has no sample for {columns - least} of {columns} ranks; raise it")
    if sum(steps for steps, _ in sizes.warmup) >= train.steps > 0:
        found.append(f"train.batch_warmup takes all of train.steps {train.steps}, none is left for train.batch")
    return found


def cpu_flags() -> frozenset[str]:
    """What the CPU can do, as Linux names it; empty where that is not known."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", proc.read("cpuinfo"), re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()
