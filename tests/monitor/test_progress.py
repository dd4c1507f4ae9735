import io
import math
import subprocess
import sys
import textwrap

import pytest
from pseudo_terminal import ROOT, on_terminal, shown

from mpitrain.monitor.progress import Progress, bar_text, plain_line, seconds_left

DEMO = """
    import sys
    from contextlib import closing
    from mpitrain.monitor import progress
    progress.REDRAW_S = 0.0
    with closing(progress.Progress(60, 20, 10)) as bar:
        for step in range(21, 61):
            bar.update(step, 6.0 - step / 20, 3e-3, 12345.6)
            if step == 40:
                bar.print_line("step 40  held-out loss [bold]2.61[/bold]")
            if step == 45:
                print("printed by the model")
            if step == 50:
                print("warned by the model", file=sys.stderr)
"""
COMMAND = [sys.executable, "-c", textwrap.dedent(DEMO)]


def plain(**options):
    stream = io.StringIO()
    progress = Progress(options.pop("total", 100), options.pop("start", 0), options.pop("every", 10), stream, **options)
    return progress, stream


def test_a_file_gets_the_first_every_nth_and_the_last_step():
    progress, stream = plain(total=25, start=3)
    for step in range(4, 26):
        progress.update(step, 1.0, 1e-3, 100.0)
    progress.close()
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["4/25", "10/25", "20/25", "25/25"]


def test_plain_lines_have_fixed_columns():
    lines = [
        plain_line(step, 100000, loss, 3e-3, rate, "tokens", left)
        for step, loss, rate, left in [
            (1, 10.98765, 3.0, math.nan),
            (99999, 0.00012, 999_999.0, 359_999.0),
            (500, math.nan, 12_345.6, 1.0),
            (500, 1.5e9, 1.23456e10, 0.0),
            (500, -12.5, 0.05, 60.0),
        ]
    ]
    for word in ("loss", "lr", "tokens/s", "left"):
        assert len({line.index(word) for line in lines}) == 1, lines
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 80
    assert lines[0] == "step      1/100000  loss  10.9877  lr 3.00e-03       3 tokens/s  left  -:--:--"
    assert lines[1] == "step  99999/100000  loss   0.0001  lr 3.00e-03      1M tokens/s  left 99:59:59"


def test_time_left_is_the_mean_without_the_slow_first_step():
    first = 3, 1000.0
    assert math.isnan(seconds_left(10, first, *first))
    assert seconds_left(10, first, 4, 1002.0) == pytest.approx(12.0)
    assert seconds_left(10, first, 6, 1012.0) == pytest.approx(16.0)
    assert seconds_left(10, first, 10, 1020.0) == 0.0


def test_a_narrow_bar_keeps_the_loss_and_the_time():
    wide, middle, narrow = (bar_text(columns, 2.5, 1e-3, 1e4, "samples", 61.0) for columns in (80, 79, 59))
    assert wide == "loss 2.5000  lr 1.00e-03    10k samples/s  left 0:01:01"
    assert middle == "loss 2.5000    10k samples/s  left 0:01:01"
    assert narrow == "loss 2.5000 0:01:01"


def test_a_log_file_has_no_control_characters(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        subprocess.run(COMMAND, stderr=log, stdout=subprocess.PIPE, cwd=ROOT, timeout=60, check=True)
    text = (tmp_path / "log").read_text()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert text.splitlines()[0].startswith("step 21/60  loss   4.9500")
    assert "step 40  held-out loss [bold]2.61[/bold]" in text.splitlines()
    assert text.splitlines()[-1].startswith("step 60/60")


@pytest.mark.parametrize("columns", [40, 70, 100])
def test_a_terminal_shows_one_bar_below_the_printed_lines(columns):
    written = on_terminal(COMMAND, columns)
    lines = shown(written)
    assert [line.rstrip() for line in lines[:3]] == [
        "step 40  held-out loss [bold]2.61[/bold]",
        "printed by the model",
        "warned by the model",
    ]
    assert lines[3].startswith("step 60/60 ━") and "loss 3.0000" in lines[3] and lines[4:] == [""]
    assert len(lines[3]) <= columns
    assert ("12.3k tokens/s" in lines[3]) == (columns >= 60)
    assert written.count("\x1b[2K") > 30


def test_the_cursor_is_always_visible():
    written = on_terminal(COMMAND, 80)
    for before_a_redraw in written.split("\x1b[2K")[:-1]:
        hidden, visible = before_a_redraw.rfind("\x1b[?25l"), before_a_redraw.rfind("\x1b[?25h")
        assert hidden <= visible


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines():
    written = on_terminal(COMMAND, 80, TERM="dumb")
    assert "\x1b" not in written and "step 60/60  loss   3.0000" in written


def test_a_terminal_without_unicode_gets_an_ascii_bar():
    written = on_terminal(COMMAND, 80, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert written.isascii() and shown(written)[3].startswith("step 60/60 -----")


def test_the_bar_follows_the_width_of_the_terminal():
    resize = """
            if step == 30:
                import fcntl, struct, termios
                fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    """
    lines = shown(on_terminal([*COMMAND[:2], textwrap.dedent(DEMO + resize)], 100))
    assert 40 < len(lines[3]) <= 50 and "tokens/s" not in lines[3]


def test_fast_steps_do_not_redraw_each_time():
    written = on_terminal([*COMMAND[:2], COMMAND[2].replace("REDRAW_S = 0.0", "REDRAW_S = 60.0")], 80)
    # the first step, the three lines said meanwhile, and the end
    assert written.count("\x1b[2K") <= 5
    assert shown(written)[3].startswith("step 60/60")


def test_a_run_without_a_terminal_does_not_import_rich():
    script = """
        import sys
        from mpitrain.monitor import logs, memory, run_files
        from mpitrain.monitor.progress import Progress
        Progress(10, 0, 1).update(1, 1.0, 1.0, 1.0)
        print([name for name in ("rich", "tensorboard", "matplotlib") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


# A launcher as the ranks see one: its own streams are what they are, the rank's are pipes into it.
LAUNCHER = '"$0" -c "$1" 2> >(cat >&2) | cat; wait $!'


def launched(columns: int, name: str = "mpirun", redirect: str = "", options: tuple[str, ...] = ()) -> str:
    command = [name, "-c", LAUNCHER.replace("| cat;", f"{redirect} | cat;"), *COMMAND[::2], *options]
    return on_terminal(command, columns, executable="/bin/bash")


def test_a_rank_behind_a_launcher_shows_a_bar_as_wide_as_the_terminal():
    lines = shown(launched(66))
    bars = [line for line in lines if line.startswith("step 60/60 ━")]
    assert len(bars) == 1 and 60 <= len(bars[0]) <= 66


def test_a_rank_with_tagged_or_redirected_output_gets_plain_lines(tmp_path):
    assert "\x1b" not in launched(80, options=("--tag-output",))
    assert "\x1b" not in launched(80, name="some_shell")
    assert "\x1b" not in launched(80, redirect=f"2> {tmp_path / 'rank.log'}")
    assert "step 60/60  loss   3.0000" in (tmp_path / "rank.log").read_text()
