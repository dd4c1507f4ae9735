"""`python -m mpitrain.plan`: its output, its files and its errors, without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planner_support import MadeUpModel
from support import clean_environment

import mpitrain.plan as command
from mpitrain.config.settings import Config
from mpitrain.parallel import layouts
from mpitrain.planner import profile
from mpitrain.planner.machine import size_of

OPTIONS = ("--nodes", "2", "--ranks-per-node", "4", "--machine", "cpu-128")


@pytest.fixture(autouse=True)
def made_up_model(monkeypatch, tmp_path):
    """Replace the configured model by one with made-up costs; no data is read and no model is built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "description_of", lambda config: None)
    monkeypatch.setattr(profile, "profile_of", lambda config, *_, **__: MadeUpModel(6, batch=config.train.batch))


def test_the_best_layouts_are_printed_and_the_first_is_written(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("[train]\nbatch = 16\nsteps = 7\n")
    assert command.main(["mine.toml", *OPTIONS, "--train.clip", "0.5", "--top", "3"]) == 0
    output = capsys.readouterr().out
    assert all(len(line) <= 120 for line in output.splitlines())
    assert "8 ranks on 2 x" in output and "samples/s" in output and "srun --nodes 2 --ntasks-per-node 4" in output
    first = output.split("\nlayout ")[1].splitlines()[0]
    assert output.count(first) >= 2
    config = Config.from_args([str(tmp_path / "plan.toml")])
    assert (config.train.batch, config.train.steps, config.train.clip) == (16, 7, 0.5)
    assert layouts.layout_of(config, 8) == layouts.read(first)


def test_layouts_that_do_not_fit_are_explained(tmp_path, capsys):
    assert command.main([*OPTIONS, "--memory", "300MiB", "--train.batch", "8"]) == 2
    output, error = capsys.readouterr()
    assert error.count("\n") == 1 and "no layout fits into 300 MiB per rank" in error and " bytes (" in error
    assert (
        "closest to fitting" in output
        and "too much; most of it process" in output
        and not (tmp_path / "plan.toml").exists()
    )


def test_one_layout_is_explained(tmp_path, capsys):
    assert command.main([*OPTIONS, "--train.batch", "16", "--explain", "2x4x1 zero1 mb2 1f1b cut:1,3,2x2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("layout 2x4x1 zero1 mb2 1f1b cut:1,3,2x2\n") and "pipeline" in output
    assert command.main([*OPTIONS, "--train.batch", "16", "--parallel.zero", "2", "--explain", "config"]) == 0
    assert capsys.readouterr().out.startswith("layout 8x1x1 zero2 mb2\n")
    assert command.main([*OPTIONS, "--memory", "300MiB", "--train.batch", "16", "--explain", "8x1x1"]) == 0
    assert "does not fit" in capsys.readouterr().out and not (tmp_path / "plan.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--nodes", "2"), "--ranks-per-node"),
        ((*OPTIONS, "--nodes", "0"), "above 0"),
        ((*OPTIONS, "--memory", "much"), "--memory = 'MUCH'"),
        ((*OPTIONS, "--explain", "4x1x1"), "8 ranks"),
        ((*OPTIONS, "--explain", "quick"), "not part of a layout"),
        ((*OPTIONS, "--machine", "cray-1"), "cray-1"),
        ((*OPTIONS, "--model.widht", "4"), "width"),
        ((*OPTIONS, "--parallel.mode", "server"), "parallel.mode"),
        (("a.toml", *OPTIONS, "--out", "a.toml"), "a.toml"),
        (("--ranks-per-node", "2"), "mpitrain.plan --measure"),
    ],
)
def test_errors_are_one_line(arguments, why, capsys):
    assert command.main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and why in captured.err


def test_memory_sizes_are_parsed():
    sizes = {"32GiB": 32 << 30, "1.5 GB": 1.5e9, "64": 64, "8kB": 8e3, "2TiB": 2 << 40, "5B": 5, "3mib": 3 << 20}
    assert {text: size_of(text, "--memory") for text in sizes} == sizes


def test_help_explains_the_layout_notation(capsys):
    with pytest.raises(SystemExit) as exit_info:
        command.main(["--help"])
    output = capsys.readouterr().out
    assert exit_info.value.code == 0 and "4x2x1 zero1 mb2 1f1b" in output and "zero-bubble" in output
    assert all(len(line) <= 120 for line in output.splitlines())


def test_scaling_prints_a_table_and_draws_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = ("--ranks-per-node", "4", "--machine", "cpu-128", "--train.batch", "16")
    assert command.main([*options, "--scale", "8,4", "--out", "scaling.png"]) == 0
    output = capsys.readouterr().out
    strong, weak = output.split("weak scaling")
    for half, batches in ((strong, ["16", "16"]), (weak, ["16", "32"])):
        lines = [line for line in half.splitlines() if line.startswith("      ")]
        assert [line.split()[0] for line in lines] == ["4", "8"] and "100%" in lines[0]
        assert all(f" {batch}  " in line for line, batch in zip(lines, batches, strict=True))
    assert (tmp_path / "scaling.png").read_bytes()[1:4] == b"PNG" and not (tmp_path / "plan.toml").exists()
    for wrong, why in ((("--scale", "6"), "multiples of 4"), (("--scale", "8", "--nodes", "2"), "remove --nodes")):
        assert command.main([*options, *wrong]) == 2
        assert why in capsys.readouterr().err


def test_the_plan_does_not_depend_on_the_load(capsys, monkeypatch, tmp_path):
    options = (*OPTIONS, "--train.batch", "16", "--out", str(tmp_path / "out.toml"))
    assert command.main(options) == 0
    calm = capsys.readouterr().out
    now = iter(range(0, 1 << 40, 1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))  # each step takes a quarter of an hour
    assert command.main(options) == 0
    assert capsys.readouterr().out == calm
    assert command.main((*options, "--seconds", "60")) == 0
    assert " 1 simulated" in capsys.readouterr().out  # on request


@pytest.mark.campaign
@pytest.mark.timeout(200)
def test_the_documented_example_is_the_output_of_the_command(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    (tmp_path / "gpt.toml").write_text(page.split("```toml\n# gpt.toml\n")[1].split("```")[0])
    command_line, printed = page.split("```bash\npython -m mpitrain.plan gpt.toml ")[1].split("```text\n")[:2]
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain.plan", "gpt.toml", *command_line.split("\n")[0].split()],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    begin, end = printed.split("```")[0].split("[...]\n")
    assert done.returncode == 0 and done.stdout.startswith(begin) and done.stdout.endswith(end), done.stdout


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_plan_is_reproducible_byte_for_byte(tmp_path):
    options = ["--nodes", "1", "--ranks-per-node", "4", "--machine", "gpu-8", "--model.layers", "2"]
    on_one_core = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]  # leaves the others to other tests
    results = []
    for seed, load in (("1", 0), ("2", 5)):
        busy = [subprocess.Popen([*on_one_core, sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            done = subprocess.run(
                [*on_one_core, sys.executable, "-m", "mpitrain.plan", *options],
                cwd=tmp_path,
                env=clean_environment() | {"PYTHONHASHSEED": seed},
                capture_output=True,
                timeout=500,
                check=False,
            )
        finally:
            for process in busy:
                process.kill()
                process.wait()
        assert done.returncode == 0, done.stderr
        results.append((done.stdout, (tmp_path / "plan.toml").read_bytes()))
    assert results[0] == results[1]


def on_devices(node, device, *arguments):
    """Plan a model of about 2 GiB in fp32 for two devices of a node; node, device: the size of their memory."""
    Path("devices.toml").write_text(
        f'node = {{ cores = 8, memory = "{node}", memory_bandwidth = "100 GB/s" }}\n'
        f'device = {{ kind = "cuda", count = 2, memory = "{device}", memory_bandwidth = "2 TB/s", '
        'matrix.fp32 = "50 Tflop/s" }\n'
    )
    options = ["--ranks-per-node", "2", "--machine", "devices.toml", "--train.batch", "16"]
    return command.main([*options, *arguments])


@pytest.mark.parametrize(
    ("node", "device", "layout", "why"),
    [
        ("64 GiB", "64 GiB", "2x1x1", ""),
        ("4 GiB", "64 GiB", "2x1x1", "no layout fits into 2 GiB of host memory per rank; "),
        ("64 GiB", "3.5 GiB", "1x1x2 offload:host", ""),
        (
            "8 GiB",
            "3.5 GiB",
            "1x1x2 offload:host",
            "no layout fits into 4 GiB of host memory per rank; ",
        ),
    ],
)
def test_the_model_and_offloaded_states_must_fit_on_the_host(node, device, layout, why, capsys, monkeypatch):
    monkeypatch.setattr(profile, "profile_of", lambda *_, **__: MadeUpModel(6, batch=16, vocabulary=1_000_000))
    assert on_devices(node, device) == (2 if why else 0)
    output, error = capsys.readouterr()
    assert why in error and error.count("\n") == bool(why)
    assert error.count("most of it " + ("states" if "offload" in layout else "model")) == bool(why)
    assert (" on the host, " in output) or not why
    assert on_devices(node, device, "--explain", layout) == 0
    output, _ = capsys.readouterr()
    assert ("does not fit" in output) == (" on the host, " in output) == bool(why)
