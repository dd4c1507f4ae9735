"""The command that runs all benchmarks, and the figures in the pages, which come from result files."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict

import pytest
from support import ROOT
from warm import bench

import benchmarks.all as every
from benchmarks.__main__ import names
from benchmarks.runner import report
from benchmarks.runner.report import Report, ReportTable, ReportTarget, keep, read_results, values_of
from mpitrain.errors import InputError

sys.path.append(str(ROOT / "docs"))
import figures

FACTS = dict.fromkeys(("machine", "cores", "nodes", "MPI", "torch", "threads", "python", "date", "tuning", "load"), "x")
PAGE = "# P\n\n<!-- begin: {} -->\nold\n<!-- end -->\n\nend\n"


def result(commit="abc", clean=True, **more):
    table = ReportTable("Step time, 2 ranks", ("contender", "ms"), [["a", 1.23456789], ["b", None]], "Medians.")
    targets = [ReportTarget("x", "≥ 1", "2", True), ReportTarget("y", "≥ 1", "-", None)]
    values = values_of("step", Report("T", [table], targets), {2: FACTS | {"commit": commit, "clean": clean}}, False)
    return json.loads(json.dumps(values)) | more


def test_the_blocks_of_the_pages_are_what_the_result_files_give():
    results = read_results()
    for page in figures.PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(figures.BLOCK.findall(text)) == len(re.findall("<!-- (begin|end)", text)) / 2, (
            f"{page}: a block is wrong"
        )
        assert figures.with_blocks(text, page.parent, results) == text, f"{page}: run python docs/figures.py"
        assert {match[1] for match in figures.BLOCK.finditer(text)} <= {"all", *names()}, page
        for match in figures.BLOCK.finditer(text):
            if match[2] == "plot" and match[1] in results:
                commit = next(iter(results[match[1]]["header"].values()))["commit"]
                assert commit.encode() in figures.picture_of(match[1]).read_bytes(), (
                    f"{match[1]}: run python docs/figures.py"
                )


def test_every_result_file_names_its_commit_and_is_no_quick_run():
    for name, values in read_results().items():
        assert values["name"] == name and values["quick"] is False
        for facts in values["header"].values():
            assert re.fullmatch("[0-9a-f]{10}", facts["commit"]), name


def test_a_block_shows_tables_targets_or_that_there_is_no_result():
    def written(what: str, results) -> str:
        text = figures.with_blocks(PAGE.format(what), ROOT, results)
        assert (
            text == figures.with_blocks(text, ROOT, results)
            and text.startswith("# P\n\n")
            and text.endswith("\n\nend\n")
        )
        return text

    one = {"step": result(options=["--ranks", "2"])}
    shown = written('step, "Step time"', one)
    assert (
        "| a | 1.23 |\n| b | - |" in shown
        and "measured at commit abc; options `--ranks 2`" in shown
        and "old" not in shown
    )
    assert "| x | ≥ 1 | 2 | met |" in written("step, targets", one)
    assert "(docs/step.png)" in written("step, plot", one)
    assert "no table" in written('step, "Memory"', one)
    assert "Not measured" in written('data, "x"', one) and "old" not in written('data, "x"', one)
    overview = written("all, targets", one | {"data": result(clean=False)})
    assert "| `step` | 1 | 0 | 1 | commit abc |" in overview and "not committed |" in overview


def test_a_result_file_has_everything_but_the_raw_values(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    keep(result(results={"2": [1.0] * 1000}), ["--ranks", "2"])
    [(name, values)] = read_results().items()
    assert name == "step" and "results" not in values and values["options"] == ["--ranks", "2"]
    assert values["tables"][0]["rows"] == [["a", 1.2346], ["b", None]]
    assert values["targets"] == [asdict(ReportTarget(**target)) for target in values["targets"]]
    assert len((tmp_path / "step.json").read_text().splitlines()) < 12


def test_a_benchmark_that_fails_or_takes_too_long_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert every._run(["json.tool", "--help"], 60)
    assert not every._run(["json.tool", "missing.json"], 60)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    assert not every._run(["slow"], 1)
    said = capfd.readouterr().err
    assert "json.tool missing.json ended with exit code" in said and "slow did not end within 1 s" in said
    with pytest.raises(InputError, match="no benchmark 'steps'"):
        every._selected("data,steps")
    assert set(every._selected(None)) == set(names()) - {"all", "guard"}


@pytest.mark.campaign
def test_a_quick_run_of_some_lists_their_targets_and_changes_no_page(tmp_path):
    before = {path: path.read_bytes() for path in (*figures.PAGES, *report.RESULTS.glob("*"))}
    only = "recording,tensor"
    done = bench("all", "--quick", "--only", only, "--ranks", "2", "--out", tmp_path, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^recording: measured at commit [0-9a-f]{10}.*, \d+ commits ago$", done.stdout, re.MULTILINE)
    assert re.search(r"^  not measured +recorded / not, 2 ranks: ", done.stdout, re.MULTILINE)
    assert before == {path: path.read_bytes() for path in (*figures.PAGES, *report.RESULTS.glob("*"))}
