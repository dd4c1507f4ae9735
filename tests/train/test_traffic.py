"""The traffic counted in real training agrees with the formulas, for each axis and ZeRO stage."""

from __future__ import annotations

import pytest

import mpitrain as mt
from mpitrain.monitor.run_files import axis_of
from mpitrain.shard.parameters import ParameterGather
from mpitrain.trainer.recording.records import bytes_along_data as of_data
from mpitrain.trainer.recording.records import expected_bytes

GPT = {"layers": 2, "width": 64, "heads": 4, "sequence": 32}
STEPS, BATCH = 2, 12
SMALL = 700  # bytes a step: the norm, the loss, which parameters were used, headers of letters


class Counted(mt.Callback):
    """A callback that counts the bytes that a rank sends, by axis, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self.totals: list[dict[str, int]] = []
        self.operations: dict[tuple[str, str], set[str]] = {}

    def on_fit_start(self, trainer: mt.Trainer) -> None:
        trainer.world.journal.start()

    def on_update(self, trainer: mt.Trainer, step: mt.Step) -> None:
        totals: dict[str, int] = {}
        for row in trainer.world.journal.account():
            axis = axis_of(row.axis)
            totals[axis] = totals.get(axis, 0) + row.inside + row.between
            self.operations.setdefault((axis, row.operation), set()).add(row.algorithm)
        self.totals.append(totals)
        self.expected = expected_bytes(trainer, trainer.samples)

    def a_step(self, axis: str) -> float:
        """Return the mean bytes sent along an axis per step, without the first step."""
        return (self.totals[-1][axis] - self.totals[0].get(axis, 0)) / (STEPS - 1)


def trained(world, text, folder, *, train=None, **parallel) -> Counted:
    """Return the bytes counted in a short run."""
    counted = Counted()
    settings = {
        "data": {"path": text},
        "model": GPT,
        "train": {"steps": STEPS, "batch": BATCH, "microbatch": 2, "evaluate_samples": 8} | (train or {}),
        "run": {"dir": str(folder)},
        "parallel": parallel,
    }
    try:
        assert mt.Trainer(settings, [counted], world=world).fit() == 0
    finally:
        world.journal.stop()
    return counted


def assert_as_expected(counted: Counted, *axes: str) -> None:
    """Check that the formula covers these axes, and that counts differ from it by at most 1 percent plus SMALL."""
    assert set(counted.expected) == set(axes)
    for axis in axes:
        sent, expected = counted.a_step(axis), counted.expected[axis]
        assert abs(sent - expected) <= 0.01 * expected + SMALL, (axis, sent, expected, counted.operations)


@pytest.mark.ranks(3, 4)
def test_data_parallel_traffic_matches_the_formulas(world, text, folder):
    n, sent = world.size, {}
    cases = [(0, True), (1, True), (1, False), (2, False), (3, False)] if n < 4 else [(1, False), (3, True)]
    for zero, share in cases:
        counted = trained(world, text, folder / f"{zero}{share}", zero=zero, share_node=share)
        assert_as_expected(counted, "data")
        sent[zero, share] = counted.a_step("data")
    if n < 4:
        rounds = -(-BATCH // n // 2)
        assert sent[1, False] == pytest.approx(sent[0, True], rel=0.02)  # the same, in two parts
        assert sent[1, True] == pytest.approx(sent[0, True] / 2, rel=0.02)  # the node has the parameters once
        assert sent[2, False] == pytest.approx((rounds + 1) / 2 * sent[0, True], rel=0.02)
        assert sent[3, False] == pytest.approx(1.5 * rounds * sent[0, True], rel=0.05)  # the root is gathered once


@pytest.mark.ranks(2, 4)
def test_pipeline_and_tensor_traffic_matches_the_formulas(world, text, folder):
    if world.size == 2:
        assert_as_expected(trained(world, text, folder / "p", pipeline=2), "pipeline")
        assert_as_expected(trained(world, text, folder / "t", tensor=2, zero=1), "tensor")
        for recompute in (True, "selective", "every 2", [1]):
            again = {"recompute": recompute, "precision": "bf16"}
            assert_as_expected(trained(world, text, folder / str(recompute), train=again, tensor=2), "tensor")
        gathered = {"recompute": "every 2", "partition_activations": True}
        assert_as_expected(trained(world, text, folder / "gathered", train=gathered, tensor=2), "tensor")
    else:
        assert_as_expected(trained(world, text, folder / "pt", pipeline=2, tensor=2), "pipeline", "tensor")
        assert_as_expected(trained(world, text, folder / "dt", tensor=2, sequence=True), "data", "tensor")
        assert_as_expected(trained(world, text, folder / "dp", pipeline=2, chunks=1, zero=2), "data", "pipeline")


def test_formulas_of_data_parallel_stages():
    x, n = 1200.0, 4
    assert of_data(x, n) == 2 * 3 / 4 * x
    assert of_data(x, n, [ParameterGather(x, n, 1)], sharded=True) == of_data(x, n)  # ZeRO-1
    assert of_data(x, n, [ParameterGather(x, n, 2)], sharded=True) == 1.5 * of_data(x, n)  # ZeRO-3
    assert of_data(x, n, sharded=True) == of_data(x, n) / 2  # one node with the parameters once
    assert of_data(x, 2, [ParameterGather(x, 2, 1)], sharded=True, passes=3) == 4 * x / 2  # ZeRO-2, three microbatches
    assert of_data(x, 2, sharded=True, replicas=2) == x / 2 + x / 2  # shares within a node, on two nodes
    assert of_data(x, 1) == 0
