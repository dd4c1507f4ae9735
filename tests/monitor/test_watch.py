"""The view `python -m mpitrain.report --watch RUN` of a run that starts, is killed, resumes and ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from itertools import pairwise
from pathlib import Path

import pytest
from monitor.pseudo_terminal import on_terminal
from rank_files import read_rank_files
from support import PATIENCE, ROOT, clean_environment, one_line, train_command
from warm import shared

from mpitrain.errors import InputError
from mpitrain.monitor import json_lines
from mpitrain.monitor.json_lines import GrowingFile
from mpitrain.monitor.run_files import EventLog, MetricsWriter
from mpitrain.monitor.watch import sparkline
from mpitrain.monitor.watched import Curve, RunStatus, WatchedRun
from mpitrain.storage import locks

SMALL = ("--model.layers", 1, "--model.width", 32, "--model.heads", 2, "--model.sequence", 32, "--train.batch", 8,
         "--train.steps", 600, "--train.evaluate_every", 50, "--checkpoint.every", 50)  # fmt: skip


def watch(folder, *options):
    return [sys.executable, "-m", "mpitrain.report", "--watch", str(folder), *options]


class Screen:
    """Command on its own terminal, with a record of all frames."""

    def __init__(self, command, columns):
        self._ours, theirs = pty.openpty()
        self.resize(columns)
        environment = clean_environment(PYTHONPATH=str(ROOT), TERM="xterm", PYTHONUTF8="1")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
                                        start_new_session=True, preexec_fn=_take_terminal)  # fmt: skip
        os.close(theirs)
        self._written = b""

    def resize(self, columns, rows=30):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, *words, seconds=100):
        """Return the first frame from now on that has all the words."""
        deadline, count = time.monotonic() + seconds * PATIENCE, len(self.frames())
        while time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.2)[0] and not self._read():
                break
            for frame in self.frames()[max(0, count - 1) :]:
                if all(word in frame for word in words):
                    return frame
        raise AssertionError(f"no frame with {words}; the last: {self.frames()[-1]}")

    def frames(self):
        text = self._written.decode(errors="replace")
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part).replace("\r", "") for part in text.split("\x1b[H")]

    def press_ctrl_c(self):
        os.write(self._ours, b"\x03")

    def end(self, seconds=100):
        deadline = time.monotonic() + seconds * PATIENCE
        while time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.2)[0] and not self._read():
                break
        return self.process.wait(10)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self):
        try:
            got = os.read(self._ours, 65536)
        except OSError:  # Linux ends a terminal whose last writer has gone with EIO
            got = b""
        self._written += got
        return got


def _take_terminal():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it, tests included
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _train(folder, sentence):
    command = shared().launched(2, train_command("--run.dir", folder, "--data.path", sentence, *SMALL))
    return subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def sentence(tmp_path):
    from mpitrain.data.prepare import prepare

    source = tmp_path / "a.txt"
    source.write_text("All happy families are alike; each unhappy family is unhappy in its own way.\n" * 400)
    prepare([str(source)], tmp_path / "text")
    return tmp_path / "text"


@pytest.mark.timeout(400)
def test_a_run_is_watched_through_a_kill_and_a_restart(tmp_path, sentence):
    run = tmp_path / "r"
    piped = subprocess.Popen(watch(run), stdout=subprocess.PIPE, text=True, env=clean_environment(PYTHONPATH=str(ROOT)))
    screen, jobs = Screen(watch(run), 100), []
    try:
        screen.until("waiting", "does not exist yet")
        jobs.append(_train(run, sentence))
        frame = screen.until("running", "step ", "held-out loss", "left", "delayed training by")
        assert "2 ranks on " in frame and "tokens/s" in frame and re.search(r"[▁▂▃▄▅▆▇█]{3}", frame), frame
        screen.resize(60)
        victim = (run / "logs/rank-00001.log").read_text().splitlines()[0].rpartition("process ")[2]
        os.kill(int(victim), signal.SIGKILL)
        assert jobs[0].wait(60) != 0
        records = read_rank_files(run)  # of seconds only, as the job was killed at its beginning
        assert set(records) == {0, 1} and all(record.lines for record in records.values())
        frame = screen.until("killed", "no process holds its lock")
        assert max(map(len, frame.splitlines())) <= 60, frame
        jobs.append(_train(run, sentence))
        frame = screen.until("running", "restarts", "1, the last from step ")
        assert screen.end() == 0 and jobs[1].wait(30) == 0
        assert "done" in screen.frames()[-1] and "step 600/600" in screen.frames()[-1]
        lines = piped.communicate(timeout=30)[0].splitlines()
    finally:
        screen.close()
        for process in (piped, *jobs):
            process.kill()
    assert piped.returncode == 0 and "\x1b" not in "".join(lines) and len(lines) < 30 * PATIENCE
    words = [re.sub(r"^[\d:]+ (\w+).*", r"\1", line) for line in lines]
    # a look may miss what lasts for a moment, but not the end, and nothing comes before what led to it
    order = iter(["waiting", "started", "running", "killed", "running", "started", "running", "done"])
    changes = [w for i, w in enumerate(words) if words[i - 1] != w or not i]
    assert all(word in order for word in changes) and {"waiting", "running", "killed", "done"} <= {*words}, lines


@pytest.fixture
def run_folder(tmp_path):
    """Return a run folder like that of a job on this machine, without running one."""
    folder = tmp_path / "r"
    folder.mkdir()
    events, metrics = EventLog(folder), MetricsWriter(folder)
    events.write("start", 0, ranks=2, hosts=[socket.gethostname()], steps=100, device="CPU", resumed_step=None)
    for step in range(1, 41):
        metrics.write(step=step, time=time.time(), loss=5.0 / step, lr=0.1, grad_norm=None, samples=4, tokens=0,
                      step_s=0.01, memory_bytes=10**8, skipped=step == 3)  # fmt: skip
    return folder, events, metrics


def run_once(folder):
    environment = clean_environment(PYTHONPATH=str(ROOT), COLUMNS="100")
    ended = subprocess.run(watch(folder, "--once"), capture_output=True, text=True, env=environment, timeout=60)
    assert not ended.stderr, ended.stderr
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("stopped", 75), ("failed", 1)])
def test_the_view_exits_with_the_code_of_the_run(run_folder, outcome, code):
    folder, events, _ = run_folder
    lock = locks.take(folder / locks.LOCK)
    assert run_once(folder)[0] == 0
    lock.close()
    events.write("end", 40, outcome=outcome, message="SIGTERM" if code else "", seconds=1.0)
    exit_code, text = run_once(folder)
    assert exit_code == code and text.split()[0] == outcome and ("SIGTERM" in text) == bool(code)
    assert "1 step, because gradients were not finite" in text and "not finite" in text


def test_ctrl_c_ends_the_view_and_not_the_run(run_folder):
    lock = locks.take(run_folder[0] / locks.LOCK)
    screen = Screen(watch(run_folder[0]), 80)
    try:
        screen.until("running")
        screen.press_ctrl_c()
        assert screen.end() == 0
    finally:
        screen.close()
        lock.close()


def test_the_lock_distinguishes_silent_from_killed_jobs(run_folder, monkeypatch):
    folder, _, metrics = run_folder
    lock, run = locks.take(folder / locks.LOCK), WatchedRun(folder)
    run.read()
    assert run.status() is RunStatus.RUNNING and locks.is_held(folder / locks.LOCK)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 61)
    run.read()
    assert run.status() is RunStatus.SILENT and "holds its lock" in run.lock_text()
    lock.close()
    run.read()
    assert run.status() is RunStatus.KILLED and "no process" in run.lock_text()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert run.status() is RunStatus.SILENT and "cannot see" in run.lock_text()
    metrics.write(step=41, loss=1.0)
    run.read()
    assert run.status() is RunStatus.RUNNING and run.step == 41


def test_steps_removed_by_a_resume_are_removed_from_the_view(run_folder):
    folder, _, metrics = run_folder
    run = WatchedRun(folder)
    run.read()
    assert run.step == 40 and len(run.steps.loss.points) == 40
    metrics.close()
    resumed = MetricsWriter(folder, resume_step=10)
    run.read()
    assert run.step == 10 and len(run.steps.loss.points) == 10
    resumed.write(step=11, loss=1.0)
    run.read()
    assert run.step == 11 and run.steps.damaged == 0


def test_only_new_complete_lines_are_read(tmp_path):
    path = tmp_path / "f"
    file = GrowingFile(path)
    assert list(file.new_lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(file.new_lines()) == [b"one\n"]
    with path.open("ab") as more:
        more.write(b"o\nthree\n")
    assert list(file.new_lines()) == [b"two\n", b"three\n"] and list(file.new_lines()) == []
    path.write_bytes(b"1\n")
    assert list(file.new_lines()) == [b"1\n"] and file.replacements == 1
    assert list(GrowingFile(path, last_bytes=10).new_lines()) == [b"1\n"]
    path.write_bytes(b"a long line\nlast\n")
    assert list(GrowingFile(path, last_bytes=7).new_lines()) == [b"last\n"]


def test_a_line_that_is_too_long_is_skipped_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LONGEST", 8)
    path = tmp_path / "f"
    file, late = GrowingFile(path), GrowingFile(path, last_bytes=12)
    path.write_bytes(b"1\n" + b"x" * 20)
    assert list(file.lines()) == [b"1\n", None] and list(late.lines()) == []  # which began in the middle of it
    with path.open("ab") as more:
        more.write(b"x" * 20)
    assert list(file.lines()) == list(late.lines()) == []
    with path.open("ab") as more:
        more.write(b"x\n\n1234567\n12345678\n2")
    assert list(file.lines()) == list(late.lines()) == [b"\n", b"1234567\n", None]
    with pytest.raises(InputError, match="line 2 is longer than"):
        list(json_lines.read_lines(path, "lines", lambda value: value, lambda value: True))


def test_warnings_and_time_categories_of_ranks_are_shown(run_folder):
    folder, events, _ = run_folder
    (folder / "logs").mkdir()
    (folder / "ranks").mkdir()
    (folder / "logs/rank-00001.log").write_text(
        "2026-01-31T23:59:58.123 rank 1 INFO all is well\n2026-01-31T23:59:59.123 rank 1 WARNING a slow disk\n"
        "2026-02-01T00:00:00.123 rank 1 ERROR Traceback (most recent call last):\n  File x\nValueError: odd\n"
    )
    (folder / "ranks/rank-00000.jsonl").write_text('{"start": 1.0, "rank": 0}\n')  # killed before it told more
    assert "% of" not in run_once(folder)[1]
    for rank, forward in ((0, 1.0), (1, 3.0)):
        seconds = {"data": 0.0, "forward": forward, "communication": 4.0 - forward}
        lines = [{"start": 1.0, "rank": rank}, {"step": 5, "steps": 5, "time": 2.0, "seconds": seconds}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"ranks/rank-{rank:05d}.jsonl").write_text(text)
    events.write("end", 40, outcome="done", message="", seconds=1.0)
    _, text = run_once(folder)
    assert "23:59:59 rank 1 WARNING a slow disk" in text and "00:00:00 rank 1 ERROR ValueError: odd" in text
    assert "all is well" not in text
    table = [line.split() for line in text.splitlines() if "rank 0 " in line or "rank 1  " in line or "% of" in line]
    assert table[-3:] == [["%", "of", "time", "forward", "comm."], ["rank", "1", "75", "25"],
                          ["rank", "0", "25", "75"]]  # fmt: skip
    names = dict.fromkeys(("data", "backward", "optimizer", "evaluation", "checkpoint", "other"), 0.1)
    for rank, role in ((0, "worker"), (1, "server")):
        line = {"step": 9, "steps": 4, "time": 3.0, "seconds": names}
        text = f'{{"start": 2.0, "rank": {rank}, "role": "{role}"}}\n{json.dumps(line)}\n'
        (folder / f"ranks/rank-{rank:05d}.jsonl").write_text(text)
    for columns in (38, 50):  # too few for a column for each part: nothing is cut, the table is turned
        last = on_terminal(watch(folder), columns).rpartition("\x1b[?1049l")[2]  # on the usual screen
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).split("\r\n")
        assert max(map(len, lines)) <= columns and "median 10 ms, 99 %" in " ".join(map(str.strip, lines)), lines
        words = [line.split() for line in lines]
        assert ["%", "of", "time", "rank", "0", "server", "1"] in words and ["backward", "17", "17"] in words, lines


def test_curves_are_thinned_and_scaled_to_their_range():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█" and sparkline([], 5) == ""
    assert sparkline([3.0, 3.0], 5) == "▁▁" and sparkline([0, 0, 7, 7], 2, "_.-:=+*#") == "_#"
    curve = Curve()
    for step in range(100_000):
        curve.add(step, float(step))
    curve.add(100_000, None)
    steps = [step for step, _ in curve.points]
    assert 500 < len(steps) <= 1024 and steps == sorted(steps) and curve.last == (99_999, 99_999.0)
    assert len({b - a for a, b in pairwise(steps)}) == 1


def test_a_path_that_is_not_a_folder_is_refused_in_one_line(tmp_path):
    path: Path = tmp_path / "file"
    path.write_text("")
    environment = clean_environment(PYTHONPATH=str(ROOT))
    one_line(subprocess.run(watch(path), capture_output=True, text=True, env=environment, timeout=60), "is a file")


def test_the_view_loads_neither_torch_nor_mpi(tmp_path):
    script = f"""if True:
        import sys
        from mpitrain.report import main
        assert main(["--watch", "--once", {str(tmp_path / "none")!r}]) == 0
        print([name for name in ("torch", "mpi4py", "numpy") if name in sys.modules])
    """
    environment = clean_environment(PYTHONPATH=str(ROOT), COLUMNS="100")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]" and done.stdout.startswith("waiting"), done.stdout + done.stderr
