"""Records of a run: the files of its ranks, and the timelines of some steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch
import warm
from monitor.trace_format import parse
from rank_files import read_rank_files
from support import PATIENCE, clean_environment, one_line, train_command

import mpitrain as mt
from mpitrain.config.settings import Config
from mpitrain.monitor import read_metrics
from mpitrain.parallel.recompute import recompute_blocks
from mpitrain.pipe.schedule import make_schedule
from mpitrain.trainer.recording.timeline import ModuleHooks, TimelineRecorder, levels_of
from mpitrain.trainer.recording.timeline import offset_of as measure

STEPS = 6
GPT = {"layers": 4, "width": 32, "heads": 4, "sequence": 16}


def trained(world, folder, text, *, timeline="3:5", clock=None, trainer=mt.Trainer, **sections):
    """Train and return the lines of metrics.jsonl."""
    defaults = {
        "run": {"dir": str(folder)},
        "data": {"path": text},
        "model": GPT,
        "train": {"steps": STEPS, "batch": 12, "microbatch": 2, "evaluate_samples": 12, "evaluate_every": 4},
        "checkpoint": {"every": 4},
        "monitor": {"timeline": timeline},
    }
    config = Config.from_dict({name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections})
    instance = trainer(config, world=world)
    if clock is not None:
        (at,) = [i for i, each in enumerate(instance.callbacks) if isinstance(each, TimelineRecorder)]
        instance.callbacks[at] = TimelineRecorder(config, clock)
    with instance.working():
        assert instance.train() == 0
    world.barrier()
    return read_metrics(folder)


def kinds(events):
    return {event["cat"] for event in events if event["ph"] == "X"}


def names(events, kind):
    return {event["name"] for event in events if event.get("cat") == kind}


def shifted(rank):
    """Return a rank's clock: offset by 1,000 s per rank, with a drift of 100 us per second and rank."""
    return lambda at: 1000.0 * (rank + 1) + at * (1.0 + 1e-4 * rank)


@pytest.mark.ranks(2, 8)
def test_clock_offset_and_drift_are_corrected_to_50_microseconds(world, folder):
    from mpitrain.monitor.timeline.merging import clock_correction

    local_clock = shifted(world.rank)

    def clock():
        return local_clock(time.perf_counter())

    for _ in range(3):  # the machine may be busy with other things in one of them
        first = measure(world, clock)
        time.sleep(0.5)
        now = time.perf_counter()  # of all ranks the same clock: they are on one machine
        last = measure(world, clock)
        line = clock_correction([[o.at, o.seconds, o.within] for o in (first, last)])
        wrong = line(local_clock(now)) - shifted(0)(now)
        deviations = world.all_gather_object([wrong, first.within, last.within])
        if good := all(abs(seconds) < 50e-6 for each in deviations for seconds in each):
            break
    assert good, deviations


@pytest.mark.parametrize(
    "zero", [pytest.param(0, marks=pytest.mark.ranks(2)), pytest.param(3, marks=pytest.mark.ranks(3))]
)
def test_recording_changes_no_result_and_the_trace_is_complete(world, folder, text, zero):
    parallel = {"zero": zero}
    plain = trained(world, folder / "plain", text, timeline="", parallel=parallel)
    lines = trained(world, folder / "run", text, clock=shifted(world.rank), parallel=parallel)
    same = ("step", "loss", "grad_norm", "held_out_loss")
    assert [[m.get(k) for k in same] for m in lines] == [[m.get(k) for k in same] for m in plain]
    assert not (folder / "plain/timeline").exists()
    events = parse(folder / "run/timeline/steps-3-5/trace.json")
    assert {event["pid"] for event in events} == set(range(world.size))
    assert kinds(events) >= {"step", "part", "forward", "backward", "communication", "wait"}
    assert names(events, "part") == {"data", "forward", "backward", "optimizer", "evaluation", "checkpoint"}
    assert {event["ph"] for event in events} == {"X", "M", "C"}
    steps = [e for e in events if e.get("cat") == "step" and e["pid"] == world.size - 1]
    assert [e["name"] for e in steps] == ["step 3", "step 4", "step 5"]
    summary = json.loads((folder / "run/timeline/steps-3-5/summary.json").read_text())
    overlap = 1e-3 + summary["clock_correction_within_s"]  # steps are in corrected time, parts are not
    for rank in summary["ranks"]:
        # other load may come between two parts, but hardly in every step, and parts never overlap
        missing = [s["seconds"] - sum(s["parts"].values()) for s in rank["steps"]]
        assert len(missing) == 3 and min(missing) < 5e-3 and all(seconds > -overlap for seconds in missing), missing
    assert 0 < summary["clock_correction_within_s"] < 1 and summary["world_size"] == world.size


@pytest.mark.parametrize(
    "schedule",
    [pytest.param("1f1b", marks=pytest.mark.ranks(4)), pytest.param("zero-bubble", marks=pytest.mark.ranks(2))],
)
def test_the_trace_has_pipeline_steps_and_messages(world, folder, text, schedule):
    parallel = {"pipeline": 2, "schedule": schedule}
    plain = trained(world, folder / "plain", text, timeline="", parallel=parallel)
    lines = trained(world, folder / "run", text, parallel=parallel)
    assert [m["loss"] for m in lines] == [m["loss"] for m in plain]
    events = parse(folder / "run/timeline/steps-3-5/trace.json")
    actions = [e for e in events if e.get("cat") == "action"]
    action_names = {"Forward", "Backward"} if schedule == "1f1b" else {"Forward", "BackwardInput", "BackwardWeight"}
    assert {e["name"] for e in actions} == action_names
    steps = make_schedule(schedule, 2, 12 // world.size).steps  # of 12 samples, two in a microbatch
    for rank in range(world.size):
        mine = sorted((e for e in actions if e["pid"] == rank), key=lambda e: e["ts"])
        sequence = [(e["name"], e["args"]["stage"], e["args"]["microbatch"]) for e in mine]
        assert sequence == 3 * [(type(step).__name__, step.stage, step.microbatch) for step in steps[sequence[0][1]]]
    assert {e["args"]["operation"] for e in events if e.get("cat") == "communication"} >= {"send", "recv"}
    assert kinds(events) >= {"forward", "backward", "action", "communication"}


class Late(mt.Trainer):
    """A trainer whose rank 1 starts each step 0.3 s late."""

    def train_step(self, batch):
        if self.world.rank == 1:
            time.sleep(0.3)
        return super().train_step(batch)


@pytest.mark.ranks(3)
def test_a_late_rank_is_named_and_others_wait_for_it(world, folder, text, monkeypatch):
    monkeypatch.setattr(
        world, "process", replace(world.process, debug=False)
    )  # else ranks wait for each other before an operation begins
    trained(world, folder, text, trainer=Late, clock=shifted(world.rank), checkpoint={"every": 0})
    waits = dict.fromkeys(range(world.size), 0.0)
    for event in parse(folder / "timeline/steps-3-5/trace.json"):
        if event.get("cat") == "wait" and event["args"]["last_rank"] == 1:
            waits[event["pid"]] += event["dur"] / 1e6
    assert waits[0] > 0.2 and waits[2] > 0.2 and waits[1] == 0.0  # of 0.9 s, where other load comes between
    summary = json.loads((folder / "timeline/steps-3-5/summary.json").read_text())
    assert summary["stragglers"][0]["rank"] == 1 and summary["stragglers"][0]["others_waited_s"] > 0.2


@pytest.mark.ranks(3)
def test_rank_files_have_times_and_memory_of_each_step(world, folder, text):
    began = time.monotonic()
    lines = trained(world, folder, text, timeline="", train={"steps": 30}, parallel={"zero": 1})
    elapsed = time.monotonic() - began
    records = read_rank_files(folder)
    assert set(records) == set(range(world.size))
    for rank, record in records.items():
        (start,) = record.starts
        assert start["rank"] == rank and start["coordinates"] == [rank, 0, 0] and start["step"] == 0
        assert start["expected_memory"]["states"] > 0
        assert sum(line["steps"] for line in record.lines) == 30 and record.lines[-1]["step"] == 30
        seconds = {part: sum(line["seconds"][part] for line in record.lines) for part in record.lines[0]["seconds"]}
        outside = seconds.pop("evaluation") + seconds.pop("checkpoint")
        assert outside > 0 and all(seconds[part] > 0 for part in ("data", "forward", "backward", "optimizer"))
        if rank == 0:
            # The parts also have what follows a step, such as writing its line, which takes long on a busy disk.
            assert 0.7 * sum(m["step_s"] for m in lines) <= sum(seconds.values()) <= elapsed
        assert sum(row[3] for line in record.lines for row in line["sent"] if row[0] == "all_gather") > 0
        memory = [line["memory"] for line in record.lines if "memory" in line]
        assert memory[0]["parameters"] > 0 and memory[0]["other"] > 1 << 20 and memory[0]["device"] == 0
        total = sum(memory[-1][k] for k in ("parameters", "gradients", "states", "activations", "buffers", "other"))
        assert total == pytest.approx(memory[-1]["host"], rel=0.01)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "parallel",
    [
        {"mode": "local", "local_steps": 3},
        {"mode": "server", "staleness": "1"},
        {"mode": "server", "servers": 1},  # a rank that takes no steps
    ],
    ids=["local", "server", "server apart"],
)
def test_steps_between_synchronizations_are_recorded(world, folder, text, parallel):
    trained(
        world, folder, text, timeline="2:2", train={"steps": 6, "microbatch": 0, "evaluate_every": 3}, parallel=parallel
    )
    events = parse(folder / "timeline/steps-2-2/trace.json")
    assert "step 2" in names(events, "step") and "step 6" not in names(events, "step")
    assert names(events, "part") >= {"data", "forward", "backward"}
    records = read_rank_files(folder)
    assert all(record.lines[-1]["step"] == 6 for record in records.values())
    servers = [world.size - 1] if parallel.get("servers") else []
    summary = json.loads((folder / "timeline/steps-2-2/summary.json").read_text())
    assert [rank for rank, record in records.items() if record.starts[0]["role"] == "server"] == servers
    assert summary["servers"] == servers and not {late["rank"] for late in summary["stragglers"]} & set(servers)
    for record in records.values():  # whether it works, serves or does both
        memory, formula = record.lines[-1]["memory"], record.starts[0]["expected_memory"]
        assert {name: memory[name] for name in formula} == pytest.approx(formula, rel=0.02)


class Recorded:
    """Calls of a model's hooks, in order."""

    def __init__(self):
        self.records = []

    def __call__(self, name, direction, begin, end):
        assert begin <= end
        self.records.append((name, direction, begin, end))

    def of(self, direction):
        return [name for name, of, _, _ in self.records if of == direction]


class Block(torch.nn.Module):
    """A residual block whose activation is computed in place."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = torch.nn.Linear(8, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.second(self.act(self.first(x)))
        y += x
        return y


@pytest.mark.parametrize("way", ["plain", "recompute", "compiled", "shared"])
def test_module_hooks_record_forward_and_backward_without_side_effects(way):
    torch.manual_seed(1)
    blocks = torch.nn.ModuleList([Block() for _ in range(3)])
    model = torch.nn.Module()
    model.blocks, model.head = blocks, torch.nn.Linear(8, 2)
    if way == "shared":
        blocks[2] = blocks[0]
    if way == "recompute":
        recompute_blocks(model)
    if way == "compiled":
        for block in blocks:
            block.compile(backend="eager")
    x = torch.randn(4, 8)

    def step():
        y = x
        for block in model.blocks:
            y = block(y)
        model.zero_grad()
        loss = model.head(y).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain, record = step(), Recorded()
    hooks = ModuleHooks([named for level in levels_of(model) for named in level], record)
    watched = step()
    hooks.end_of_backward(time.perf_counter())
    hooks.remove()
    count = len(record.records)
    assert (
        all(map(torch.equal, plain, watched)) and all(map(torch.equal, plain, step())) and len(record.records) == count
    )
    order = ["blocks.0", "blocks.1", "blocks.0" if way == "shared" else "blocks.2"]
    assert [n for n in record.of("forward") if n.count(".") == 1 or n == "head"] == [*order, "head"]
    assert [n for n in record.of("backward") if n.count(".") == 1 or n == "head"] == ["head", *order[::-1]]
    inner = ["blocks.1.second", "blocks.1.act", "blocks.1.first"]
    if way != "compiled":
        assert [n for n in record.of("backward") if n.startswith("blocks.1.")] == inner
    spans = sorted((b, -e) for _, _, b, e in record.records)
    around = []
    for begin, negative in spans:
        while around and around[-1] <= begin:
            around.pop()
        assert not around or -negative <= around[-1]
        around.append(-negative)


@pytest.mark.campaign
@pytest.mark.serial
def test_a_job_killed_while_recording_leaves_readable_files_and_resumes(tmp_path, sentence, forked):
    run = tmp_path / "run"
    arguments = (
        "--run.dir", run, "--data.path", sentence, "--model.layers", 1, "--model.width", 16, "--model.heads", 2,
        "--model.sequence", 16, "--train.batch", 4, "--checkpoint.every", 50, "--monitor.every", 1000,
    )  # fmt: skip
    words = train_command(*arguments, "--train.steps", 1000000, "--monitor.timeline", "20:900000")
    endless = warm.shared().launched(2, words)
    process = subprocess.Popen(endless, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60 * PATIENCE
        while not (run / "checkpoints/step-00000100").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        (pid,) = (int(line.split("process ")[1]) for line in (run / "logs/rank-00001.log").read_text().splitlines()[:1])
        os.kill(pid, signal.SIGKILL)
        assert process.wait(30) != 0
    finally:
        process.kill()
    before = read_rank_files(run)
    assert set(before) <= {0, 1}
    steps = read_metrics(run)[-1]["step"] // 50 * 50
    again = (*arguments, "--train.steps", steps + 20, "--monitor.timeline", f"{steps + 5}:{steps + 8}")
    done = warm.job(2, train_command(*again))
    assert done.returncode == 0, done.stderr
    assert "timeline.png" in done.stderr and "hidden behind backward" in done.stderr  # where the progress is
    assert parse(run / f"timeline/steps-{steps + 5}-{steps + 8}/trace.json")
    for record in read_rank_files(run).values():
        assert record.lines[-1]["step"] == steps + 20
        numbers = [line["step"] for line in record.lines]
        assert numbers == sorted(set(numbers))
    wrong = forked.run("train", *arguments, "--monitor.timeline", "9:5")
    one_line(wrong, "monitor.timeline", "A:B with 1 <= A <= B")
