"""Foreign names, messages and prompts reach a terminal as plain text and cannot control it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from monitor.pseudo_terminal import on_terminal
from monitor.report_runs import Story, make_run
from support import one_line

from mpitrain.checkpoint.__main__ import main as checkpoint
from mpitrain.data.__main__ import main as data
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError, exit_code_of, message_of, printable
from mpitrain.report import main as report

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\r\x7f"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
LONG = "long" * 1250


def safe(text):
    assert not CONTROLS.search(text), ascii(CONTROLS.search(text))
    assert LONG not in text
    return text


def test_control_characters_are_printed_as_escapes():
    assert printable(EVIL) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\r\x7f"
    assert printable("a\n\tb\x0b", as_text=True) == "a\n\tb\\x0b" and printable("a\nb") == "a\\nb"
    assert printable("Ünïcödé 漢字 🙂") == "Ünïcödé 漢字 🙂" and len(printable(LONG)) == 200
    shown = message_of(InputError(f"key {LONG} is wrong\n{EVIL}; write another"))
    assert len(shown) < 500 and "\n" not in safe(shown) and shown.endswith("; write another")


@pytest.fixture
def run(tmp_path):
    """Return a run folder whose names and messages are hostile."""
    folder = make_run(tmp_path / f"run{EVIL}", Story(ranks=2, steps=20, killed_at=0))
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    events[0] |= {"hosts": [EVIL, LONG], "device": EVIL, "parallel": EVIL + LONG}
    save = {"time": events[-1]["time"], "event": "save", "step": 10, "folder": EVIL + LONG, "seconds": 0.1}
    end = {"time": events[-1]["time"], "event": "end", "step": 20, "outcome": "failed", "message": EVIL + LONG}
    path.write_text("".join(json.dumps(event) + "\n" for event in [*events[:-1], save, end]))
    (folder / "checkpoints" / f"step-{EVIL}").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "logs/rank-00000.log").write_text(f"2026-01-31T23:59:59.123 rank 0 WARNING {EVIL} {LONG}\n")
    return folder


def test_reports_and_watch_print_no_control_characters(run, capfd):
    for arguments in ([run], [run, run], ["--watch", run]):
        report([str(argument) for argument in arguments])
        assert "owned" in safe(capfd.readouterr().out)
    screen = on_terminal([sys.executable, "-c", "import sys; from mpitrain.report import main; main(sys.argv[1:])",
                          "--once", str(run)], 120)  # fmt: skip
    assert "owned" in safe(re.sub(r"\x1b\[[\d;]*m|\r\n", "", screen))
    (run / "metrics.jsonl").write_text("")
    code = report([str(run)])
    safe(one_line((code, capfd.readouterr().err), "owned"))


def test_data_sets_checkpoints_and_errors_print_no_control_characters(tmp_path, capsys):
    source = tmp_path / "t.csv"
    source.write_text("".join(f"{n},{'a' + EVIL if n % 2 else LONG}\n" for n in range(20)).replace("\r", ""))
    prepare([str(source)], tmp_path / "set", held_out=0.0)
    assert data(["info", str(tmp_path / "set")]) == 0
    assert "owned" in safe(capsys.readouterr().out)
    for main, arguments in ((data, ["info", EVIL]), (checkpoint, ["ls", EVIL]), (data, ["info", LONG])):
        assert main(arguments) != 0
        safe(capsys.readouterr().err.rstrip("\n"))

    def fail():
        raise InputError(EVIL + LONG)

    assert exit_code_of(fail) == 2
    safe(capsys.readouterr().err.rstrip("\n"))


def test_generated_text_keeps_its_lines_and_is_written_unchanged():
    code = f"""if True:
        from mpitrain.generate import _Screen
        from mpitrain.inference.prompts import BytesCodec
        screen = _Screen({EVIL!r}, BytesCodec().decoder())
        for token in ({EVIL!r} + "one\\n\\ttwo").encode():
            screen.add(0, token)
        screen.end()
    """
    screen = on_terminal([sys.executable, "-c", code], 120)
    assert screen.count("owned") == 2 and "one\r\n\ttwo" in screen.expandtabs(1).replace(" two", "\ttwo")
    safe(screen.replace("\r\n", "\n"))
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).stdout.decode()
    assert piped == f"{EVIL}{EVIL}one\n\ttwo\n"
