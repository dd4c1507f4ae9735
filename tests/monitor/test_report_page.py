"""The report as a page and as pictures: data and units of every chart, no network loads, old and damaged runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert
from monitor.test_timeline import recorded
from monitor_browser import browser, count_marks, require_browser
from report_runs import Story, make_run
from support import ROOT, one_line

from mpitrain import report
from mpitrain.monitor.report.charts import learning_rate, losses, memory_over_time, time_over_steps
from mpitrain.monitor.report.findings import (
    NamedRun,
    changed_settings,
    expected_traffic,
    findings,
    histogram,
    memory_use,
    points_to_draw,
    ranks_to_show,
    sent_along,
    short_names,
    stragglers,
)
from mpitrain.monitor.report.reading import RunRecord, read_run
from mpitrain.monitor.report.style import LIGHT, paint, spec_of
from mpitrain.monitor.report.within_step import memory_in_step
from mpitrain.monitor.timeline.spans import write_rank

ONE = {
    "course", "loss", "learning_rate", "gradient_norm", "throughput", "step_time", "step_histogram", "parts",
    "parts_over_time", "memory", "memory_formula", "bytes", "bytes_formula", "held_out_token_accuracy",
    "held_out_perplexity",
}  # fmt: skip
SEVERAL = (ONE - {"parts_over_time"}) | {"held_out_loss"}


@pytest.fixture(scope="module", autouse=True)
def bundle() -> Iterator[None]:
    """Make the script that draws the charts once, which takes two seconds, and not for each page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", cache(vl_convert.javascript_bundle))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two runs of eight ranks: DDP, killed and restarted, and ZeRO-3."""
    folder = tmp_path_factory.mktemp("runs")
    return {"ddp": make_run(folder / "ddp"), "zero3": make_run(folder / "zero3", Story(zero=3, killed_at=0))}


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the page of one run and the page of both."""
    folder = tmp_path_factory.mktemp("pages")
    assert report.main([str(runs["ddp"]), "--out", str(folder / "one.html")]) == 0
    assert report.main([*map(str, runs.values()), "--out", str(folder / "both.html")]) == 0
    return {"one": folder / "one.html", "both": folder / "both.html"}


def specs_in(page: Path) -> dict[str, dict[str, Any]]:
    (text,) = re.findall(r'<script type="application/json" id="specs">(.*?)</script>', page.read_text())
    return dict(json.loads(text))


def parts_of(node: Any) -> list[dict[str, Any]]:
    """Return every object in a chart's specification."""
    if isinstance(node, list):
        return [part for inner in node for part in parts_of(inner)]
    if not isinstance(node, dict):
        return []
    inner = [part for key, value in node.items() if key not in ("datasets", "data") for part in parts_of(value)]
    return [node, *inner]


@pytest.mark.parametrize(("page", "names"), [("one", ONE), ("both", SEVERAL)])
def test_every_chart_has_data_title_and_units(pages, page, names):
    specs = specs_in(pages[page])
    assert set(specs) == names
    for name, spec in specs.items():
        assert spec["title"], name
        rows = [row for values in spec["datasets"].values() for row in values]
        assert rows, name
        for part in parts_of(spec):
            for channel in ("x", "y"):
                axis = part.get("encoding", {}).get(channel)
                if isinstance(axis, dict) and axis.get("type") == "quantitative" and "title" in axis:
                    unit = re.search(r"\(.+\)", axis["title"] or "") or axis["title"] == "step"
                    assert unit, f"{name}: {channel} has no unit: {axis['title']!r}"


def test_a_page_is_self_contained(pages):
    for page in pages.values():
        text = page.read_text()
        assert len(text) < 2_500_000
        assert text.count("window.vegaEmbed = vegaEmbed") + text.count("window.vegaEmbed=") == 1
        head = re.sub(r"<script.*?</script>", "", text, flags=re.S)
        assert not re.search(r"https?://|//cdn|@import|url\(", head)
        assert not re.search(
            r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"'](?!data:)", text[: text.index("<main>")]
        )
        assert not re.search(r"https?://", json.dumps(specs_in(page)))


def test_findings_report_kills_stragglers_and_formulas(runs):
    text = "\n".join(findings(read_run(runs["ddp"])))
    assert "Start 1 was killed, at step 290 or later; the next start resumed from step 200." in text
    assert re.search(r"Rank 5 on node1 is a straggler: .* largest difference is in backward", text), text
    assert (
        "the formula predicts 201.6 MB (+2.4%)" in text and "along data; the formula predicts 88.2 MB (+0.0%)" in text
    )
    assert list(stragglers(read_run(runs["ddp"]))) == [5]


def test_lost_ranks_stops_and_failures_are_reported_and_drawn(tmp_path):
    folder = make_run(tmp_path / "run", Story(ranks=2, steps=20, killed_at=0))
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    end, lost = events.pop(), {"event": "lost", "ranks": [3], "recovered_s": 3.2}
    events.append(lost | {"time": end["time"] - 1, "step": 12})
    events.append({"time": end["time"] - 0.5, "event": "stop", "step": 20, "reason": "SIGTERM"})
    events.append({"time": end["time"] - 0.4, "event": "of a later version", "step": 20})
    events.append(end | {"outcome": "failed", "message": "rank 1: the disk is full"})
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = findings(read_run(folder))
    assert "Start 1 failed after step 20 (rank 1: the disk is full)." in lines
    assert "Ranks were lost at step 12: 3; the run continued after 3.2 s." in lines
    assert report.main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    specs = specs_in(tmp_path / "page.html")
    for name, events_in in (("course", {"ranks lost", "stop"}), ("loss", {"ranks lost", "stop", "failure"})):
        rows = [row for values in specs[name]["datasets"].values() for row in values]
        assert {row["event"] for row in rows if "event" in row} == events_in, name


def test_held_out_metrics_of_the_newest_job_are_drawn(tmp_path):
    folder = make_run(tmp_path / "run", Story(ranks=2, steps=120, killed_at=0))
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    wild = {"../top 5": 0.75, "lost": None, "wrong": "much", "token_accuracy": 10**400, "nan": math.nan}
    again = {"time": events[-1]["time"], "event": "evaluate", "step": 100, "loss": 1.0, "metrics": {"perplexity": 3.5}}
    later = again | {"step": 150, "metrics": {"perplexity": 9.9}}  # of a step that was not taken again
    events[-1:-1] = [again, later, again | {"step": 50, "metrics": wild}, again | {"metrics": [0.5]}]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert report.main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    specs = specs_in(tmp_path / "page.html")  # whose names are those of the pictures' files
    assert {name for name in specs if name.startswith("held_out")} == {
        "held_out_token_accuracy", "held_out_perplexity", "held_out____top_5",
    }  # fmt: skip
    points = {
        name: {row["step"]: row["value"] for rows in specs[name]["datasets"].values() for row in rows}
        for name in ("held_out_perplexity", "held_out____top_5", "held_out_token_accuracy")
    }
    assert set(points["held_out_perplexity"]) == {50, 100} and points["held_out_perplexity"][100] == 3.5
    assert points["held_out____top_5"] == {50: 0.75}
    assert points["held_out_token_accuracy"][50] == pytest.approx(0.6 - 0.5 * math.exp(-50 / 110))


def test_memory_of_ddp_and_zero_3_matches_the_formula(runs):
    measured, expected = [], []
    for folder in runs.values():
        use = memory_use(read_run(folder))[0]
        measured.append(sum(use.peak[name] for name in use.expected))
        expected.append(sum(use.expected.values()))
    assert measured[0] - measured[1] == pytest.approx(expected[0] - expected[1], rel=0.05)


def test_several_runs_are_compared_in_text(runs, capsys):
    assert report.main([*map(str, runs.values())]) == 0
    out = capsys.readouterr().out
    assert re.search(r"parallel.zero +0 +3\n", out) and re.search(r"states \(MB\) +103\.\d+ +12\.\d+ \(0.12x\)", out)
    assert re.search(r"held-out token accuracy +0\.\d+ +0\.\d+ \(\d\.\d\dx\)", out)
    assert re.search(r"held-out perplexity +\d\.\d+ +\d\.\d+ \(\d\.\d\dx\)", out)
    assert re.search(r"bytes sent per step and rank \(MB\) +88.200 +132.300 \(1.50x\)", out)


def test_memory_within_a_step_is_drawn_for_each_rank_and_for_runs_side_by_side(runs, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(runs["zero3"], tmp_path / name)
        for rank in range(2):
            memory = [[11.0, {"parameters": 5, "activations": 0}], [11.2, {"parameters": 5, "activations": 4 + rank}]]
            timeline = recorded(rank, memory=[[at * (1 + 1e-4 * rank) + 100 * rank, row] for at, row in memory])
            write_rank(tmp_path / name / "timeline/steps-5-5", timeline)
    both = [NamedRun(name, read_run(tmp_path / name)) for name in ("a", "b")]
    for shown, panels in ((both[:1], ["rank 0", "rank 1"]), (both, ["a: rank 1", "b: rank 1"])):
        drawing = memory_in_step(shown)
        (rows,) = spec_of(drawing.chart)["datasets"].values()
        assert list(dict.fromkeys(row["panel"] for row in rows)) == panels
        assert [row["peak"] for row in rows if "peak" in row] == ["after forward of block"] * 2
        assert f"{panels[1]}, step 5, 10 B after forward of block" in drawing.note
    assert "monitor.timeline" in memory_in_step([NamedRun("none", read_run(runs["ddp"]))]).note


def test_a_page_reports_missing_files(tmp_path, capsys):
    lines = [
        {
            "step": s,
            "loss": 1 / s,
            "step_s": 0.1,
            "samples": 8,
            "tokens": 0,
            "world_size": 2,
            "grad_norm": None,
            "lr": 0.1,
        }
        for s in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    page = tmp_path / "page.html"
    assert report.main([str(tmp_path), "--out", str(page)]) == 0
    assert "MB; opens in a browser" in capsys.readouterr().out
    assert set(specs_in(page)) == {"loss", "learning_rate", "throughput", "step_time", "step_histogram"}
    text = page.read_text()
    for why in ("no events of the run", "No measurements of ranks", "norm was not measured", "No held-out loss"):
        assert why in text


def test_a_run_of_one_step_is_drawn_as_points(tmp_path):
    folder = make_run(tmp_path / "run", Story(ranks=2, steps=5, killed_at=0, straggler=-1))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    run = [NamedRun("run", read_run(folder))]
    for drawing in [*losses(run), learning_rate(run)]:
        shown = [part["mark"] for part in parts_of(spec_of(drawing.chart)) if isinstance(part.get("mark"), dict)]
        assert any(mark["type"] == "point" and mark.get("opacity") != 0 for mark in shown), drawing.name
    assert time_over_steps(run[0]).chart is None  # an area needs two of them
    assert "rank with the most memory" in memory_over_time(run[0]).title


def test_a_run_without_a_step_is_explained(tmp_path, capsys):
    event = {"time": 1.0, "event": "end", "step": 0, "outcome": "failed", "message": "no module 'nothing'"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    for more in ([], ["--out", str(tmp_path / "page.html")]):
        code = report.main([str(tmp_path), *more])
        one_line((code, capsys.readouterr().err), "no finished step", "no module 'nothing'")


def test_step_times_of_several_runs_share_the_bins():
    fast, slow = np.linspace(0.9, 1.1, 90), np.append(np.linspace(1.9, 2.1, 89), 500.0)
    (_, edges, _), (shares, same, more) = (histogram(times, among=[fast, slow]) for times in (fast, slow))
    assert np.array_equal(edges, same) and edges[0] == 0.9 and edges[-1] <= 5 * 2.1
    assert more == 1 and shares.sum() == pytest.approx(89 / 90)


def test_traffic_of_tied_ranks_counts_for_their_axis(tmp_path):
    folder = make_run(tmp_path / "run", Story(ranks=2, steps=20, killed_at=0))
    for path in (folder / "ranks").iterdir():
        path.write_text(path.read_text().replace('"data", "two_level"', '"data tied [0, 1]", "two_level"'))
    run = read_run(folder)
    assert sum(sent_along(run, "data")) == pytest.approx(expected_traffic(run)["data"])
    assert any("along data" in finding and "(+0.0%)" in finding for finding in findings(run))


def test_run_names_like_colours_and_loss_units_are_drawn(tmp_path):
    named = {"@blue": "squared error", "@nowhere": "squared error", "@": "nats"}
    runs = {n: make_run(tmp_path / n, Story(ranks=2, steps=20, killed_at=0, loss_unit=u)) for n, u in named.items()}
    label = {"@blue": "loss (squared error)", "@": "loss (nats)", "": "loss (unit of the model)"}
    for folder in (runs["@blue"], runs["@"]):
        (chart,) = losses([NamedRun(folder.name, read_run(folder))])
        assert f'"title": "{label[folder.name]}"' in json.dumps(spec_of(chart.chart))
    several = [NamedRun(name, read_run(folder)) for name, folder in runs.items()]
    spec = spec_of(losses(several)[0].chart)
    assert label[""] in json.dumps(spec) and label["@blue"] not in json.dumps(spec)
    text = json.dumps(paint(spec, LIGHT))
    assert '"@blue"' in text and '"@nowhere"' in text and LIGHT["blue"] in text and '"@orange"' not in text
    assert report.main([*map(str, runs.values()), "--png", str(tmp_path / "png")]) == 0


def test_a_page_escapes_run_texts_and_overwrites_only_reports(pages, tmp_path, capsys):
    folder = make_run(tmp_path / "<b>&'@@VEGA@@", Story(ranks=2, steps=20, killed_at=0))
    out = Path(shutil.copy(pages["one"], tmp_path / "page.html"))
    assert report.main([str(folder), "--out", str(out)]) == 0  # over an earlier report
    assert "<b>" not in re.sub(r"<script.*?</script>", "", out.read_text(), flags=re.S).split("<main>")[0]
    capsys.readouterr()
    config = folder / "config.toml"
    before = config.read_text()
    code = report.main([str(folder), "--out", str(config)])
    one_line((code, capsys.readouterr().err), "not a report", "--out")
    assert config.read_text() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "ranks/rank-00001.jsonl"])
@pytest.mark.parametrize(
    "damage", [b"\xff\0\n", b"[]\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n", b'{"step": -1, "time": []}\n']
)
def test_damaged_files_are_reported_in_one_line(tmp_path, capsys, name, damage):
    folder = make_run(tmp_path / "run", Story(ranks=2, steps=20, killed_at=0))
    lines = (folder / name).read_bytes().splitlines(keepends=True)
    (folder / name).write_bytes(lines[0] + damage + b"".join(lines[1:]))
    code = report.main([str(folder), "--out", str(tmp_path / "page.html")])
    one_line((code, capsys.readouterr().err), name.rpartition("/")[2])
    assert not (tmp_path / "page.html").exists()


def test_an_incomplete_line_does_not_hide_the_next_start(tmp_path):
    folder = make_run(tmp_path / "run", Story(ranks=2, steps=40, killed_at=30, save_every=10))
    path = folder / "ranks/rank-00001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    second = max(i for i, line in enumerate(lines) if "start" in json.loads(line))
    path.write_text("".join(lines[:second]) + '{"step": 31, "st\n' + "".join(lines[second:]) + '{"step": 45, "s')
    rank = read_run(folder).ranks[1]
    assert (rank.rank, rank.header.step, rank.step[-1]) == (1, 30, 40.0)


def test_thinned_curves_keep_minimum_and_maximum():
    values = np.sin(np.arange(1_000_000) / 1000.0)
    values[123_456], values[777_777], values[5:9] = 9.0, -9.0, math.nan
    at = points_to_draw(values)
    assert len(at) <= 1502 and {0, 123_456, 777_777, 999_999} <= set(at.tolist())
    assert ranks_to_show([3.0, 1.0, 2.0]) == [0, 1, 2]
    assert ranks_to_show([float(x) for x in range(1000)]) == [0, 499, 999]


def test_run_names_are_short_and_distinct():
    paths = [Path("/a/x/run"), Path("/a/y/run"), Path("/b/y/other"), Path("/" + "long" * 20)]
    names = short_names(paths)
    assert names[:3] == ["x/run", "y/run", "other"] and len(names[3]) <= 28
    assert len(set(short_names([paths[0], paths[0]]))) == 2
    changed = changed_settings({"train": {"steps": 7, "clip": 1.0}, "gone": {"key": 1}})
    assert set(changed) == {"train.steps", "gone.key"} and changed["gone.key"] == (1, None)


def test_the_command_needs_neither_torch_nor_mpi_and_names_the_extra_of_charts(runs, tmp_path):
    code = f"""
import sys
sys.modules["vl_convert"] = None  # to import it fails
from mpitrain import report
assert report.main([{str(runs["ddp"])!r}]) == 0
assert report.main([{str(runs["ddp"])!r}, {str(runs["zero3"])!r}]) == 0
loaded = {{"torch", "mpi4py", "altair"}} & set(sys.modules)
assert not loaded, loaded
sys.exit(report.main([{str(runs["ddp"])!r}, "--out", {str(tmp_path / "x.html")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    one_line((done.returncode, done.stderr), "mpitrain[monitor]")


def pixels(path: Path) -> bytes:
    """Return the uncompressed data of a PNG file."""
    data, at, packed = path.read_bytes(), 8, b""
    assert data.startswith(b"\x89PNG\r\n")
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return zlib.decompress(packed)


def test_each_chart_is_written_as_a_picture(runs, tmp_path, capsys):
    assert report.main([str(runs["zero3"]), "--png", str(tmp_path / "deep/pictures")]) == 0
    assert f"pictures: {len(ONE)} in" in capsys.readouterr().out
    for name in ONE:
        drawn = pixels(tmp_path / f"deep/pictures/{name}.png")
        assert len(drawn) > 100_000 and len(set(drawn)) > 20, name


def test_pages_of_many_ranks_and_steps_stay_small(tmp_path):
    folder = make_run(tmp_path / "run", Story(ranks=64, steps=1600, killed_at=0, straggler=40))
    page = tmp_path / "page.html"
    assert report.main([str(folder), "--out", str(page)]) == 0
    assert page.stat().st_size < 2_500_000
    rows = [row for values in specs_in(page)["parts"]["datasets"].values() for row in values]
    assert len({row["bar"] for row in rows}) == 3 and "rank 40" in {row["bar"] for row in rows}
    assert "Of 64 ranks" in page.read_text()


@pytest.mark.campaign
@pytest.mark.serial
@pytest.mark.timeout(180)
def test_a_browser_draws_every_chart_without_warnings(pages, tmp_path):
    odd = [make_run(tmp_path / name, Story(ranks=2, steps=20, killed_at=0)) for name in ("@blue", "@nowhere")]
    assert report.main([*map(str, odd), "--out", str(tmp_path / "odd.html")]) == 0
    with browser(require_browser(), tmp_path / "profile") as page:
        for path, names in ((pages["one"], ONE), (pages["both"], SEVERAL)):
            for scheme, paper in (("light", "rgb(244, 246, 248)"), ("dark", "rgb(13, 17, 23)")):
                page.open(path, scheme)
                assert page.value("getComputedStyle(document.body).backgroundColor") == paper
                marks = count_marks(page)
                assert set(marks) == names and min(marks.values()) >= 2, marks
                assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
            for choice in ("seconds", "samples"):
                page.value(f"axis.value = '{choice}'; axis.dispatchEvent(new Event('change'))")
                page.wait_until_drawn()
                text = page.value("document.getElementById('loss').textContent")
                assert ("time in steps (" if choice == "seconds" else "samples seen") in text
            page.value("theme.value = 'light'; theme.dispatchEvent(new Event('change'))")
            page.wait_until_drawn()
            assert page.value("document.documentElement.dataset.theme") == "light"
            page.value("theme.value = 'auto'; theme.dispatchEvent(new Event('change'))")
            page.wait_until_drawn()
        page.open(tmp_path / "odd.html")
        text = page.value("document.getElementById('loss').textContent")
        assert "@blue" in text and "@nowhere" in text
        assert not page.complaints
        assert page.requests and all(url.startswith(("file://", "data:")) for url in page.requests)


def test_readers_return_the_recorded_values(runs):
    run = read_run(runs["ddp"])
    assert isinstance(run, RunRecord)
    assert [(s.outcome, s.first_step, s.last_step, s.ranks) for s in run.starts] == [
        ("killed", 0, 290, 8),
        ("done", 200, 400, 8),
    ]
    assert len(run.ranks) == 8 and run.ranks[3].header.step == 200 and run.facts["torch"] == "2.9.0"
    assert len(run.columns.step) == 400 and run.config["parallel"]["zero"] == 0
