"""Useful arithmetic of a step: floating-point operations, operations per second, and their share of the peak (MFU).

The matrix products, convolutions and attention of one microbatch's forward pass are counted in the first step of a job
(with the formulas of `torch.utils.flop_counter`). Backward takes twice as many, because each product has a gradient
with respect to both of its factors. If all parameters are in matrix products, and N is their number, D the number of
tokens, L the layers, W their width and T the tokens of a sample, a transformer then has

    6 N D + 12 L W T D

operations. What is computed again for backward (train.recompute) is not useful, and is not counted.

Reference:
    Chowdhery et al., "PaLM: scaling language modeling with Pathways", 2022, appendix B.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.planner.counted import flops_of
from mpitrain.planner.machine import MachineProfile, profile_of, read_machine
from mpitrain.speeds import kept
from mpitrain.trainer.run import Callback, Run, Step


class ProductCounter(TorchDispatchMode):
    """Context manager that counts the floating-point operations of matrix products, and never makes a product fail.

    Attributes:
        flops: Operations counted so far; NaN if those of some product are unknown.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        try:
            self.flops += flops_of(getattr(func, "_overloadpacket", func), args, kwargs, out)[0]
        except Exception:  # torch's formula may not know these arguments
            self.flops = math.nan
        return out


class UsefulArithmetic(Callback):
    """Adds to each step its useful `flops`, `tflops_per_rank`, and `mfu` if the peak of the hardware is known.

    Nothing is added if operations cannot be counted, as in a compiled model.
    """

    def __init__(self) -> None:
        self._counter = ProductCounter()
        self._of_sample: float | None = None  # useful operations of a sample; None until counted, NaN if unknown
        self._peak: float | None = None  # FLOP/s of all ranks together

    def on_fit_start(self, trainer: Run) -> None:
        self._counter, self._of_sample = ProductCounter(), None
        if _is_compiled(trainer.engine.module):  # inside the counter it would run as if not compiled
            self._counter.flops = math.nan
        else:
            trainer.engine.recorder = self._counter
        self._peak = peak_of_ranks(trainer)

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if self._of_sample is None:
            self._of_sample = self._count(trainer, step)
        if self._of_sample is None or not self._of_sample > 0:
            return
        flops = round(trainer.batch_sizes.size(step.number - 1) * self._of_sample)
        step.extras |= {"flops": flops, "tflops_per_rank": flops / step.seconds / trainer.world.size / 1e12}
        if self._peak:
            step.extras["mfu"] = flops / step.seconds / self._peak

    def _count(self, trainer: Run, step: Step) -> float | None:
        """Return the useful operations of a sample in the whole model: None if there was no sample, NaN if unknown.

        Collective if several ranks compute the same samples.

        Args:
            trainer: Trainer of the run.
            step: The step, which other ranks may not have reached.
        """
        engine, mesh, useful = trainer.engine, trainer.mesh, self._counter.flops
        is_counted = engine.recorded_samples > 0 or math.isnan(useful)
        if engine.recorded_samples:
            sizes = [(p.numel(), p.requires_grad) for p in engine.module.parameters()]
            trained = sum(size for size, trains in sizes if trains) / max(1, sum(size for size, _ in sizes))
            useful *= (2 + trained) / engine.recorded_samples  # a frozen weight needs no gradient
        totals = torch.tensor([useful if is_counted else 0.0, is_counted], dtype=torch.float64)
        parts = mesh.world.size // mesh.readers.size
        if parts > 1:
            if not step.together:
                return None
            trainer.world.all_reduce(totals)
        total, ranks = totals.tolist()
        return parts * total / ranks if ranks else None


def _is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile was applied to a part of the module."""
    return any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in module.modules())


def peak_of_ranks(trainer: Run) -> float | None:
    """Return the FLOP/s of matrix products that the cores or devices of all ranks reach together; None if unknown.

    It is the manufacturer's figure for 16-bit products on a known device. Otherwise it is the fastest product in the
    machine profile: parallel.machine, or the profile of this machine that `parallel.auto` has measured and stored.
    Collective if the ranks compute on accelerators; the result is right on rank 0.
    """
    world, config, device = trainer.world, trainer.config, trainer.device
    precision, on_device = config.train.precision, hardware.is_accelerator(device)
    count = float(world.size)
    if on_device:
        count = len(set(world.all_gather_object(f"{world.node} {hardware.identity(device)}")))
        if precision != "fp32" and (known := hardware.matrix_peak(device)) is not None:
            return count * known
    machine = _read_profile(config.parallel.machine) if world.rank == 0 else None
    if machine is None or (on_device and (machine.device is None or machine.device.kind != device.type)):
        return None
    if not on_device:
        threads = torch.get_num_threads()
        count = sum(min(machine.cores, ranks * threads) for ranks in Counter(world.nodes).values())
    table = (machine.device or machine if on_device else machine).matrix.get(precision)
    return count * max(speed for _, speed in table) if table else None


def _read_profile(file: str) -> MachineProfile | None:
    """Return the machine profile in a file, or the stored one if `file` is empty; None if there is none."""
    with suppress(InputError):
        return read_machine(file) if file else profile_of(kept.load_profile(), str(kept.profile_path()))
    return None
