"""Values that ranks show one another at a meeting, and meetings of ranks that are about to do different things."""

from __future__ import annotations

import pytest
import torch

from mpitrain.run.meetings import Meetings
from mpitrain.run.session import ScriptRun

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(params=["one node", "nodes"])
def session(world, request, monkeypatch):
    """Return a session whose ranks meet in shared memory, or as between nodes."""
    if request.param == "nodes":
        monkeypatch.setattr(type(world), "alternating", lambda comm, capacity: None)
    return ScriptRun(world, __file__)


@pytest.fixture
def operations(world, monkeypatch) -> list[str]:
    """Return the list to which the names of the operations after the meetings are added."""
    names: list[str] = []
    for name in ("all_reduce", "all_gather"):
        original = getattr(type(world), name)

        def counted(comm, *args, _name=name, _original=original, **kwargs):
            names.append(_name)
            return _original(comm, *args, **kwargs)

        monkeypatch.setattr(type(world), name, counted)
    return names


def test_a_small_sum_is_one_meeting_and_has_the_bits_of_a_large_one(session, operations):
    capacity = session._meetings.capacity
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        itemsize = 4 if dtype == torch.bfloat16 else 8 if dtype == torch.bool else dtype.itemsize
        generator = torch.Generator().manual_seed(session.rank)
        x = (torch.randn(capacity // itemsize + 1, generator=generator) * 10).to(dtype)
        large = session.sum(x)
        assert operations == ["all_reduce"]
        lengths = [0, 1, 6, x.numel() - 1] if capacity else [0]
        for n in lengths:
            small = session.sum(x[:n].view(-1, 2) if n == 6 else x[:n])
            assert small.dtype == large.dtype
            assert torch.equal(small.view(-1), large[:n]), (dtype, n)
        assert operations == ["all_reduce"]
        operations.clear()


def test_small_rows_are_gathered_in_one_meeting(session, operations):
    counts = tuple(range(session.size))  # rank 0 has no rows
    rows = session.layouts.rows(counts)
    capacity = session._meetings.capacity
    for width in (1, 0, 3, capacity or 100):
        for at in (0, 1):
            whole = torch.arange(rows.total * width * 2, dtype=torch.int64).view(rows.total, width, 2)
            whole = whole if at == 0 else whole.movedim(0, 1).contiguous()
            out = session.gather(rows.cut(whole, at), at, rows)
            assert torch.equal(out, whole) and out.is_contiguous()
        assert operations == (["all_gather"] * 2 if 8 * 2 * width > capacity else [])
        operations.clear()
    assert not session.meet("nothing") and session.meet("a flag", session.rank == 1)


def test_ranks_that_do_different_things_see_it_and_read_no_values(world, session):
    meetings = Meetings(world)
    numel = 2 if meetings.capacity else 0
    for turn in range(4):
        mine = world.rank if turn % 2 else 0
        views = meetings.values(numel, torch.float64)
        views[world.rank].fill_(world.rank + turn)
        assert meetings.meet(mine, False) is (None if turn % 2 else False)
        assert [x.tolist() for x in views] == [[rank + turn] * numel for rank in range(world.size)]
