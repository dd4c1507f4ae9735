"""Agreement on operations: what ranks do is a function of what they have submitted."""

from __future__ import annotations

import pytest
import torch

from mpitrain.horovod.torch.execution import rows_of_ranks
from mpitrain.horovod.torch.negotiation import Presence, match
from mpitrain.horovod.torch.submission import Submission

WAITING, POLLING, JOINED, LEAVING = Presence


def key(name, kind="allreduce", shape=(2,), dtype=torch.float32):
    return Submission(kind, name, [torch.zeros(shape, dtype=dtype)]).key


def submitted(*names, **form):
    return {name: key(name, **form) for name in names}


def test_operations_of_all_ranks_are_carried_out_in_the_order_of_the_first():
    outcome = match([submitted("a", "b", "c"), submitted("c", "a")], [WAITING] * 2, ["a", "a"])
    assert outcome.ready == ("a", "c") and not outcome.failed and not outcome.stuck


@pytest.mark.parametrize("form", [{"shape": (3,)}, {"shape": (1, 2)}, {"dtype": torch.int32}, {"kind": "broadcast"}])
def test_operations_that_differ_fail_and_others_are_carried_out(form):
    outcome = match([submitted("a", "b"), submitted("b") | submitted("a", **form)], [WAITING] * 2, ["a", "b"])
    assert outcome.ready == ("b",) and list(outcome.failed) == ["a"]
    assert "rank 0" in outcome.failed["a"] and "but rank 1" in outcome.failed["a"]


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_the_first_dimension_of_gathered_tensors_may_differ(kind):
    forms = [submitted("a", kind=kind, shape=(rows, 4)) for rows in (0, 3)]
    assert match(forms, [WAITING] * 2, ["a", "a"]).ready == ("a",)


def test_ranks_that_wait_for_each_other_are_stuck_unless_one_polls():
    pending = [submitted("a"), submitted("b")]
    outcome = match(pending, [WAITING, WAITING], ["a", "b"])
    assert "rank 0 waits for 'a'; rank 1 waits for 'b'" in outcome.stuck and outcome.agreed
    assert not match(pending, [WAITING, POLLING], ["a", "b"]).stuck
    outcome = match([*pending, {}], [WAITING, WAITING, JOINED], ["a", "b", ""])
    assert outcome.stuck and not outcome.agreed  # the others may catch the error, and join


def test_joined_ranks_take_part_in_sums_only():
    pending = [submitted("a") | submitted("g", kind="allgather"), {}]
    outcome = match(pending, [WAITING, JOINED], ["a", ""])
    assert outcome.ready == ("a",) and "rank 1 has joined" in outcome.failed["g"] and not outcome.agreed


def test_a_rank_that_leaves_ends_the_waiting_of_others():
    outcome = match([submitted("a"), {}], [WAITING, LEAVING], ["a", ""])
    assert not outcome.ready and "rank 1 has called hvd.shutdown()" in outcome.failed["a"] and not outcome.agreed


def test_an_error_is_agreed_only_if_every_rank_waits_for_what_failed():
    pending = [submitted("a", "b"), submitted("a", "b", shape=(3,))]
    assert match(pending, [WAITING] * 2, ["a", "b"]).agreed
    assert not match(pending, [WAITING] * 2, ["a", "c"]).agreed
    assert not match(pending, [WAITING, POLLING], ["a", "a"]).agreed


def test_rows_are_divided_as_equally_as_possible():
    assert [rows_of_ranks(rows, 3) for rows in (0, 1, 5, 6)] == [[0, 0, 0], [1, 0, 0], [2, 2, 1], [2, 2, 2]]
