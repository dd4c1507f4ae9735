"""Seconds of operations on a machine that one need not have: what takes longer, the products or the bytes.

(The roofline model: Williams et al. 2009.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log

from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.recorder import CountedOperation

_FALLBACK = 4e10  # operations per second of a core or device whose profile says nothing
_START = 1.5e-5  # seconds until an operation begins, from Python or autograd, on one core
_PREPARED = {  # further seconds of those that reorder their tensors, or are made of several
    "convolution": 1.2e-4,
    "convolution_backward": 1.6e-4,
    "native_batch_norm": 5e-5,
    "native_batch_norm_backward": 5e-5,
}
_REACHED = {  # of the speed of a product of cold matrices of that size, on one core
    "convolution": 0.75,
    "convolution_backward": 0.7,
    "_scaled_dot_product_flash_attention_for_cpu": 0.7,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 0.7,
    "addmm": 0.9,
    "mm": 0.9,
}
_LAUNCH = 6e-6  # the same of a device
_HEAVY = {  # operations that compute more on each byte than a copy does, in times of moving it on one core
    "gelu": 6.0,
    "gelu_backward": 6.0,
    "tanh": 4.0,
    "exp": 2.0,
    "log": 2.0,
    "_softmax": 2.0,
    "_log_softmax": 2.0,
    "polar": 4.0,
    "native_layer_norm": 1.5,
    "native_layer_norm_backward": 2.0,
    "native_batch_norm": 4.5,
    "native_batch_norm_backward": 3.5,
    "native_dropout": 4.0,
    "bernoulli_": 8.0,
}


def seconds(operations: Sequence[CountedOperation], machine: MachineProfile, precision: str, threads: int = 1) -> float:
    """How long a rank takes for operations, while all others of its node do the same.

    Args:
        operations: One after the other.
        machine: The speeds; of its device where it has one, else of a core.
        precision: Of products.
        threads: That the rank computes with, on the CPU.
    """
    device = machine.device
    if device is not None:
        gain, start = 1.0, _LAUNCH
    else:
        gain, start = _gain(machine, threads), _START
    rate = _memory_rate(machine)
    table = sorted((device.matrix if device is not None else machine.matrix).get(precision, ()))
    total = 0.0
    for each in operations:
        heavy = _HEAVY.get(each.name, 1.0) if device is None else 1.0
        moving = each.nbytes * heavy / rate
        begun = start + (_PREPARED.get(each.name, 0.0) if device is None else 0.0)
        reached = _REACHED.get(each.name, 1.0) if device is None else 1.0
        computing = each.flops / (reached * _speed(table, each.size)) if each.flops else 0.0
        total += begun + max(computing, moving) / gain
    return total


def moving(nbytes: float, machine: MachineProfile, threads: int = 1) -> float:
    """How long a rank takes to read or write so many bytes, beside what else an operation does."""
    return nbytes / _memory_rate(machine) / (_gain(machine, threads) if machine.device is None else 1.0)


def _gain(machine: MachineProfile, threads: int) -> float:
    return 1.0 + (threads - 1) * machine.threads


def _memory_rate(machine: MachineProfile) -> float:
    """Bytes per second, reads and writes together, of a rank's device or of a core while all others are as busy."""
    if machine.device is not None:
        return machine.device.memory_rate
    links = machine.links
    return 2.0 * min(links.copy_rate, links.memory_rate / max(1, machine.cores))  # a copy reads and writes


def _speed(table: Sequence[tuple[int, float]], size: float) -> float:
    """Of products of a size: between the table's, linear in the size's logarithm; beyond them, the nearest's."""
    if not table:
        return _FALLBACK
    if size <= table[0][0]:
        return table[0][1]
    for (low, slow), (high, fast) in pairwise(table):
        if size <= high:
            return slow + (fast - slow) * (log(size) - log(low)) / (log(high) - log(low))
    return table[-1][1]
