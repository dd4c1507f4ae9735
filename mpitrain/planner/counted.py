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
_START = 1e-5  # seconds until an operation begins, from Python or autograd, on one core
_PREPARED = {"convolution": 5e-5, "convolution_backward": 1e-4}  # further seconds of those that reorder their tensors
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
    "native_batch_norm": 2.0,
    "native_batch_norm_backward": 2.0,
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
        rate, gain, start = device.memory_rate, 1.0, _LAUNCH
    else:
        links = machine.links
        rate = 2.0 * min(links.copy_rate, links.memory_rate / max(1, machine.cores))  # a copy reads and writes
        gain, start = 1.0 + (threads - 1) * machine.threads, _START
    table = sorted((device.matrix if device is not None else machine.matrix).get(precision, ()))
    total = 0.0
    for each in operations:
        heavy = _HEAVY.get(each.name, 1.0) if device is None else 1.0
        moving = each.nbytes * heavy / rate
        begun = start + (_PREPARED.get(each.name, 0.0) if device is None else 0.0)
        total += begun + max(each.flops / _speed(table, each.size) if each.flops else 0.0, moving) / gain
    return total


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
