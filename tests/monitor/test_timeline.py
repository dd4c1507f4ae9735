"""Timelines, tested without MPI: time categories, rank files, and the traces made of them."""

from __future__ import annotations

import json

import pytest
from monitor.trace_format import parse
from rank_files import read_rank_files

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.monitor.parts import StepClock
from mpitrain.monitor.run_files import RankWriter
from mpitrain.monitor.timeline.curves import highest_curves
from mpitrain.monitor.timeline.merging import clock_correction, describe, merge, recordings, timelines
from mpitrain.monitor.timeline.spans import write_rank


class Hands:
    """Clock that is set by hand."""

    def __init__(self):
        self.now = self.waited = 0.0

    def go(self, seconds, waited=0.0):
        self.now += seconds
        self.waited += waited


def test_time_categories_add_up_and_waits_count_as_communication():
    hands = Hands()
    clock = StepClock(lambda: hands.waited, now=lambda: hands.now)
    with clock.data:
        hands.go(1)
    with clock.backward:
        hands.go(2, waited=0.5)
        with clock.forward:  # recomputed by hand
            hands.go(4)
        hands.go(8)
    hands.go(16, waited=1)
    seconds = clock.read()
    assert {part: s for part, s in seconds.items() if s} == {
        "data": 1, "forward": 4, "backward": 9.5, "communication": 1.5, "other": 15,
    }  # fmt: skip
    assert sum(seconds.values()) == hands.now
    with clock.optimizer:
        hands.go(3)
        assert clock.read()["optimizer"] == 3  # in the midst of it
        hands.go(5)
    assert clock.read()["optimizer"] == 5
    assert sum(clock.totals().values()) == hands.now
    hands.go(7, waited=2)
    clock.skip()
    hands.go(1)
    assert {part: s for part, s in clock.read().items() if s} == {"other": 1}


@pytest.mark.parametrize("value", ["5", "0:3", "7:5", "a:b", "5:", ":5", "1:2:3", "-1:4", "5:9 "])
def test_invalid_step_ranges_are_refused_in_one_line(value):
    with pytest.raises(InputError, match="A:B with 1 <= A <= B") as caught:
        Config.from_dict({"monitor": {"timeline": value}})
    assert "\n" not in str(caught.value) and "monitor.timeline" in str(caught.value)


def test_rank_files_with_incomplete_lines_and_restarts_are_read(tmp_path):
    header = {"world_size": 2, "step": 0}
    for rank in range(2):
        writer = RankWriter(tmp_path, rank, 10.0, header)
        for step in (1, 3, 6):
            writer.write(step, step - {1: 0, 3: 1, 6: 3}[step], seconds={"data": 1.0})
        writer.close()
    path = tmp_path / "ranks/rank-00000.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"step": 7, "ste')
    again = RankWriter(tmp_path, 0, 20.0, {"world_size": 1, "step": 4})  # the line of steps 4 to 6 goes
    again.write(5, 1)
    again.close()
    assert all(json.loads(line) for line in path.read_text().splitlines())  # the torn one is gone
    records = read_rank_files(tmp_path)
    assert [line["step"] for line in records[0].lines] == [1, 3, 5] and len(records[0].starts) == 2
    assert [line["step"] for line in records[1].lines] == [1, 3]  # it was there up to the step of the restart


def recorded(rank, **more):
    """Return a rank's recording; its clock is off by 100 s times its rank and drifts by 1e-4 times its rank."""

    def local_time(at):
        return at * (1 + 1e-4 * rank) + 100 * rank

    shift = [[local_time(at), at - local_time(at), 1e-6] for at in (10.0, 30.0)]
    parts = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer"), 0.2)
    late = 0.4 * rank
    return {
        "token": "a", "rank": rank, "world_size": 2, "host": "n0", "node": 0, "device": "cpu", "unix": 1.0,
        "offsets": shift,
        "steps": [[5, local_time(11.0), local_time(12.0), parts]],
        "spans": [
            ["forward", "block", local_time(11.1), local_time(11.2), {}],
            ["part", "forward", local_time(11.1), local_time(11.2), {"waited": 0.0}],
            ["part", "backward", local_time(11.2), local_time(11.8), {"waited": 0.1}],
            ["action", "Forward", local_time(11.1), local_time(11.2), {"stage": 0, "microbatch": 1}],
        ],
        "communication": [
            ["all_reduce", "data", "ring", 8, 4, local_time(11.3 + late / 10), local_time(11.7), True, "data", 1],
            ["all_reduce", "world", "mpi", 8, 4, local_time(11.5 + late), local_time(12.0), False, "world", 1],
        ],
        "waited": {"backward": 0.1},
        "memory": [[local_time(11.0), {"parameters": 4, "host": 9}]],
    } | more  # fmt: skip


def test_clocks_are_corrected_linearly():
    rank_time = 7.0 * 1.0001 + 100
    line = clock_correction([[10.0 * 1.0001 + 100, -100 - 10e-4, 0.0], [30.0 * 1.0001 + 100, -100 - 30e-4, 0.0]])
    assert line(rank_time) == pytest.approx(7.0, abs=1e-9)
    assert clock_correction([[3.0, 5.0, 0.0]])(4.0) == 9.0


def test_merging_finds_waits_shares_and_stragglers(tmp_path):
    folder = tmp_path / "timeline/steps-5-5"
    for rank in range(2):
        write_rank(folder, recorded(rank))
    write_rank(folder, recorded(2, token="of an earlier start"))
    late_server = recorded(2, role="server", world_size=3)
    write_rank(tmp_path / "served", recorded(0, role="worker", world_size=3))
    write_rank(tmp_path / "served", late_server)
    alone = merge(tmp_path / "served").summary
    assert alone["servers"] == [2] and not alone["stragglers"]  # the others wait for it, as they asked for something
    assert recordings(tmp_path) == [folder] and recordings(folder) == [folder]
    merged = merge(folder)
    events = parse(merged.trace)
    waits = {(e["pid"], e["args"]["axis"]): e["args"]["wait_ms"] for e in events if e.get("cat") == "communication"}
    assert waits == pytest.approx({(0, "data"): 40, (0, "world"): 400, (1, "data"): 0, (1, "world"): 0}, abs=1e-2)
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"main", "communication", "pipeline"}
    summary = merged.summary
    under = [rank["communication_under_backward_s"] for rank in summary["ranks"]]
    assert under[0] == pytest.approx(0.4 - 0.2, abs=1e-6)  # from 11.5 to 11.7 the main thread communicated, too
    assert under[1] == pytest.approx(0.36 - 0.1, abs=1e-6)  # and here it waited for what was in the background
    assert summary["stragglers"][0]["rank"] == 1
    assert summary["stragglers"][0]["others_waited_s"] == pytest.approx(0.44, abs=1e-3)
    (ring,) = [row for row in summary["operations"] if row["algorithm"] == "ring"]
    assert (ring["calls"], ring["bytes_inside_nodes"], ring["bytes_between_nodes"]) == (2, 16, 8)
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert merged.picture is not None and merged.picture.read_bytes().startswith(b"\x89PNG")
    assert any("hidden behind backward" in line for line in describe(merged))


def curve_of(device):
    """Return the memory of a rank whose activations grow in forward and which then needs temporary memory."""
    empty = {"parameters": 40, "activations": 0, "shared": 3, "other": 500}
    grown = empty | {"activations": 30}
    memory = [[11.0, empty], [11.2, grown], [11.5, grown | {"activations": 20, "other": 900}], [13.0, grown]]
    return timelines([recorded(0, memory=memory, device=device)])[0]


def test_the_module_at_the_peak_of_memory_is_named():
    (on_cpu,), (on_device,) = highest_curves([curve_of("cpu")]), highest_curves([curve_of("cuda:0")])
    assert (on_cpu.step, on_cpu.peak_bytes, on_cpu.where) == (5, 73, "after forward of block")  # freed memory may stay
    assert (on_device.peak_bytes, on_device.seconds[on_device.peak]) == (963, pytest.approx(0.5))
    assert len(on_cpu.nbytes) == 3  # the last sample is not in the step
    assert highest_curves(timelines([recorded(0)])) == []  # of an older version


def test_invalid_recordings_are_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="has no recording"):
        merge(tmp_path)
    (tmp_path / "rank-00000.json").write_text('{"token": "a"}')
    with pytest.raises(InputError, match="is not a recording of a rank"):
        merge(tmp_path)
