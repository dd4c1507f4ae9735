"""The file RUN/events.jsonl: complete lines, also after a kill, on a full disk, and for a concurrent reader."""

from __future__ import annotations

import resource
import signal

import pytest

from mpitrain.errors import InputError
from mpitrain.monitor.run_files import EVENTS, EventLog, read_events


def kinds(events):
    return [(event["event"], event["step"]) for event in events]


def test_lines_are_written_whole_and_incomplete_ones_are_removed(tmp_path):
    log = EventLog(tmp_path)
    log.write("start", 0, ranks=2, config={"optim": {"lr": float("nan")}})
    assert read_events(tmp_path)[0]["config"] == {"optim": {"lr": None}}
    log.write("save", 5, folder="x" * 100_000)
    log.close()
    path = tmp_path / EVENTS
    for torn in (b'{"time": 1.0, "event": "end", "step": 7}', b'{"time"', b"{" + b"x" * 200_000):
        whole = path.read_bytes()
        path.write_bytes(whole + torn)
        assert kinds(read_events(path)) == [("start", 0), ("save", 5)]
        EventLog(tmp_path).close()
        assert path.read_bytes() == whole
    path.write_bytes(b"{")
    EventLog(tmp_path).close()
    assert path.read_bytes() == b"" and read_events(tmp_path / "none") == []


def test_damage_is_reported_in_one_line(tmp_path):
    for line in ("[]", "{}", '{"event": "end", "step": 1}', '{"event": 3, "step": 1, "time": 2}', "\0\0"):
        (tmp_path / EVENTS).write_text('{"time": 1, "event": "new kind", "step": 0}\n' + line + "\n")
        with pytest.raises(InputError, match=r"line 2 is damaged; remove it"):
            read_events(tmp_path)


def test_a_line_that_does_not_fit_on_the_disk_is_not_written(tmp_path):
    log = EventLog(tmp_path)
    log.write("start", 0)
    size = (tmp_path / EVENTS).stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(InputError, match=r"events\.jsonl cannot be written .*; make room"):
            log.write("end", 1)
        assert (tmp_path / EVENTS).stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    log.write("end", 2)
    assert kinds(read_events(tmp_path)) == [("start", 0), ("end", 2)]
