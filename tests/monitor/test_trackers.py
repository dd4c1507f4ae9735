"""TensorBoard, W&B, MLflow and custom trackers: the real packages, offline, read back from their files."""

from __future__ import annotations

import json
import os
import struct
import sys

import pytest
from support import one_line

from mpitrain.config.run import MonitorSection
from mpitrain.config.settings import Config
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.monitor import read_metrics
from mpitrain.monitor.trackers import Tracker, Tracking, requested_trackers

SMALL = ("--model.layers", 1, "--model.width", 16, "--model.heads", 2, "--model.sequence", 16, "--train.batch", 4)
# a tracker, and a guard against connections to other machines
OWN = """
import json, socket
from mpitrain.monitor.trackers import Tracker

def refuse(real):
    def connect(self, address):
        if self.family != socket.AF_UNIX and not str(address[0]).startswith("127."):
            open("network", "a").write(f"{address}\\n")
        return real(self, address)
    return connect

socket.socket.connect = refuse(socket.socket.connect)
socket.socket.connect_ex = refuse(socket.socket.connect_ex)

class UserTracker(Tracker):
    def start(self, run_dir, config, resume_step):
        self.file = open(run_dir / "own", "a")
        self.append([config["monitor"]["project"], resume_step])
    def log(self, step, figures):
        self.append([step, figures["loss"], sorted(figures)])
        if step == 3:
            raise RuntimeError("no more")
    def append(self, what):
        self.file.write(json.dumps(what) + "\\n")
        self.file.flush()
    def close(self):
        self.append("closed")
"""
# a network of its own, where that is allowed, which leads nowhere
WITHOUT_NETWORK = """
import ctypes
ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET
"""


def wandb_records(path):
    """Return the records of a .wandb file: a header of 7 bytes, then LevelDB's log of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack("<xxxxHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def wandb_losses(path):
    items = [record.history for record in wandb_records(path) if record.HasField("history")]
    names = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in items]
    return [(row["_step"], row["loss"]) for row in names]


@pytest.mark.timeout(180)
def test_offline_trackers_have_each_step_once_after_a_resume(tmp_path, forked, monkeypatch):
    for package in ("wandb", "mlflow", "tensorboard"):
        pytest.importorskip(package, reason="the extras `monitor` and `trackers` are not installed")
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "a.txt").write_text("All happy families are alike.\n" * 400)
    prepare([str(tmp_path / "a.txt")], tmp_path / "text")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NETWORK)
    run, tracker_flags = tmp_path / "r", ["--monitor.tracker", "own:UserTracker", "--monitor.project", "families"]
    tracker_flags += [word for tool in ("wandb", "mlflow", "tensorboard") for word in (f"--monitor.{tool}", "true")]
    arguments = ("--run.dir", run, "--data.path", tmp_path / "text", *SMALL, *tracker_flags)
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "PYTHONPATH": str(tmp_path)}
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for steps in (4, 6):
        all_arguments = (*arguments, "--train.steps", steps, "--optim.warmup", 2)
        ended = forked.run("train", *all_arguments, cwd=tmp_path, timeout=100, **home)
        assert ended.returncode == 0, ended.stderr
        output = (ended.stdout + ended.stderr).lower()
        assert "wandb:" not in output and "mlflow " not in output and "warning" not in output, output
        failed = "tracker usertracker failed at step 3 and is not used any more: runtimeerror: no more (own.py:"
        assert output.count(failed) == (steps == 4)
    assert not (tmp_path / "network").exists()

    losses = [(line["step"], line["loss"]) for line in read_metrics(run)]
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(s, pytest.approx(v)) for s, v in losses]
    assert "time" not in board.Tags()["scalars"] and "grad_norm" in board.Tags()["scalars"]

    parts = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(parts) == 2 and parts[0].name == parts[1].name  # of one run
    assert wandb_losses(parts[0]) + wandb_losses(parts[1]) == losses
    [wandb_run] = [record.run for record in wandb_records(parts[0]) if record.HasField("run")]
    assert (wandb_run.project, wandb_run.display_name) == ("families", "r")

    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    client = MlflowClient(tracking_uri=(run / "mlflow").as_uri())
    [entry] = client.search_runs([client.get_experiment_by_name("families").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(entry.info.run_id, "loss")] == losses
    assert (entry.info.run_name, entry.info.status) == ("r", "FINISHED") and entry.data.params["train.batch"] == "4"

    rows = [json.loads(line) for line in (run / "own").read_text().splitlines()]
    assert rows[0] == ["families", None] and [row[0] for row in rows[1:4]] == [1, 2, 3] and rows[4] == "closed"
    assert rows[5] == ["families", 4] and [row[:2] for row in rows[6:8]] == [list(pair) for pair in losses[4:]]
    assert rows[8] == "closed" and "ids" not in rows[1][2] and {"lr", "step_s", "memory_bytes"} <= set(rows[1][2])


@pytest.mark.parametrize(("key", "extra", "package"), [
    ("tensorboard", "monitor", "torch.utils.tensorboard"),
    ("wandb", "trackers", "wandb"),
    ("mlflow", "trackers", "mlflow"),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(monkeypatch, key, extra, package):
    monkeypatch.setitem(sys.modules, package, None)  # to import it fails
    with pytest.raises(InputError, match=rf'monitor\.{key} needs .*pip install "mpitrain\[{extra}\]"'):
        requested_trackers(MonitorSection(**{key: True}))


def test_online_without_a_login_is_refused_without_a_prompt(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `trackers` is not installed")
    for name, value in {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracking = Tracking(requested_trackers(MonitorSection(wandb=True)), print)
    with pytest.raises(InputError, match="nobody is logged in; set WANDB_API_KEY"):
        tracking.start(tmp_path, Config().model_dump(), None)


def test_an_invalid_user_defined_tracker_is_refused_in_one_line(tmp_path, forked):
    done = forked.run("train", "--run.dir", tmp_path / "r", *SMALL, "--monitor.tracker", "collections:Counter")
    one_line(done, "monitor.tracker collections:Counter returns a Counter", "derive it from that class")
    assert not (tmp_path / "r/metrics.jsonl").exists()


def test_a_failing_tracker_is_reported_once_and_removed():
    class Fails(Tracker):
        def log(self, step, figures):
            raise OSError("the disk is full")

    class Keeps(Tracker):
        def __init__(self):
            self.seen = []

        def log(self, step, figures):
            self.seen.append((step, dict(figures)))

        def close(self):
            raise ValueError("closed twice")

    messages, keeps = [], Keeps()
    tracking = Tracking([Fails(), keeps], messages.append)
    for step in (1, 2):
        tracking.log(step, {"time": 1.0, "loss": 0.5, "samples": 4, "skipped": True, "ids": [1], "grad_norm": None})
    tracking.close()
    assert keeps.seen == [(1, {"loss": 0.5, "samples": 4}), (2, {"loss": 0.5, "samples": 4})]
    assert [text.split(":")[0] for text in messages] == [
        "tracker Fails failed at step 1 and is not used any more", "tracker Keeps failed when it was closed",
    ]  # fmt: skip
