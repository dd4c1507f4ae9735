import logging
import re
import subprocess
import sys
import textwrap

import pytest
from pseudo_terminal import ROOT

from mpitrain.errors import InputError
from mpitrain.monitor.logs import close_rank_log, log_path, open_rank_log


@pytest.fixture(autouse=True)
def closed():
    yield
    close_rank_log()


def test_a_line_has_time_rank_and_level_and_is_flushed(tmp_path, capfd):
    logger = open_rank_log(tmp_path, 3)
    logger.info("step %d", 7)
    logger.debug("too much")
    text = (tmp_path / "logs" / "rank-00003.log").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} rank 3 INFO step 7\n", text)
    assert capfd.readouterr() == ("", "")


def test_a_resumed_run_continues_its_log(tmp_path):
    for text in ("before", "after"):
        open_rank_log(tmp_path, 0).warning(text)
        close_rank_log()
    lines = log_path(tmp_path, 0).read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["before", "after"]


def test_a_second_log_closes_the_earlier_file(tmp_path):
    open_rank_log(tmp_path / "one", 0)
    open_rank_log(tmp_path / "two", 0)
    logging.getLogger("mpitrain").error("now")
    assert log_path(tmp_path / "one", 0).read_text() == ""
    assert log_path(tmp_path / "two", 0).read_text().count("now") == 1


@pytest.mark.parametrize(("rank", "place"), [(0, "stderr"), (2, "log")])
def test_warnings_are_printed_by_rank_0_and_logged_by_others(tmp_path, rank, place):
    script = f"""
        import warnings
        from mpitrain.monitor.logs import open_rank_log
        open_rank_log({str(tmp_path)!r}, {rank})
        warnings.warn("look here")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60
    )
    log = log_path(tmp_path, rank).read_text()
    assert ("look here" in done.stderr) == (place == "stderr")
    assert ("look here" in log) == (place == "log")


def test_an_unwritable_log_is_named(tmp_path):
    (tmp_path / "logs").write_text("a file in the way")
    with pytest.raises(
        InputError, match=r"rank-00001\.log cannot be written \(.*\); free some space, or choose a run\.dir"
    ):
        open_rank_log(tmp_path, 1)
