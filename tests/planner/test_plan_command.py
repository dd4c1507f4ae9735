"""`python -m mpitrain.plan`: its output, its files and its errors, without MPI."""

from __future__ import annotations

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

ASKED = ("--nodes", "2", "--ranks-per-node", "4", "--machine", "cpu-128")


@pytest.fixture(autouse=True)
def made_up(monkeypatch, tmp_path):
    """Replace the configured model by one with made-up costs; no data is read and no model is built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "description_of", lambda config: None)
    monkeypatch.setattr(profile, "profile_of", lambda config, *_, **__: MadeUpModel(6, batch=config.train.batch))


def test_the_best_layouts_are_told_and_the_first_is_written(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("[train]\nbatch = 16\nsteps = 7\n")
    assert command.main(["mine.toml", *ASKED, "--train.clip", "0.5", "--top", "3"]) == 0
    output = capsys.readouterr().out
    assert all(len(line) <= 120 for line in output.splitlines())
    assert "8 ranks on 2 x" in output and "samples/s" in output and "srun --nodes 2 --ntasks-per-node 4" in output
    first = output.split("\nlayout ")[1].splitlines()[0]
    assert output.count(first) >= 2
    config = Config.from_args([str(tmp_path / "plan.toml")])
    assert (config.train.batch, config.train.steps, config.train.clip) == (16, 7, 0.5)
    assert layouts.layout_of(config, 8) == layouts.read(first)


def test_what_does_not_fit_is_told_with_its_reason(tmp_path, capsys):
    assert command.main([*ASKED, "--memory", "300MiB", "--train.batch", "8"]) == 2
    output, error = capsys.readouterr()
    assert error.count("\n") == 1 and "no layout fits in the 300 MiB of a rank" in error and " bytes (" in error
    assert (
        "closest to fitting" in output
        and "too much; most of it process" in output
        and not (tmp_path / "plan.toml").exists()
    )


def test_one_layout_is_explained(tmp_path, capsys):
    assert command.main([*ASKED, "--train.batch", "16", "--explain", "2x4x1 zero1 mb2 1f1b cut:1,3,2x2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("layout 2x4x1 zero1 mb2 1f1b cut:1,3,2x2\n") and "pipeline" in output
    assert command.main([*ASKED, "--train.batch", "16", "--parallel.zero", "2", "--explain", "config"]) == 0
    assert capsys.readouterr().out.startswith("layout 8x1x1 zero2 mb2\n")
    assert command.main([*ASKED, "--memory", "300MiB", "--train.batch", "16", "--explain", "8x1x1"]) == 0
    assert "does not fit" in capsys.readouterr().out and not (tmp_path / "plan.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--nodes", "2"), "--ranks-per-node"),
        ((*ASKED, "--nodes", "0"), "above 0"),
        ((*ASKED, "--memory", "much"), "--memory = 'MUCH'"),
        ((*ASKED, "--explain", "4x1x1"), "8 ranks"),
        ((*ASKED, "--explain", "quick"), "not part of a layout"),
        ((*ASKED, "--machine", "cray-1"), "cray-1"),
        ((*ASKED, "--model.widht", "4"), "width"),
        ((*ASKED, "--parallel.mode", "server"), "parallel.mode"),
        (("a.toml", *ASKED, "--out", "a.toml"), "a.toml"),
        (("--ranks-per-node", "2"), "mpitrain.plan --measure"),
    ],
)
def test_errors_are_one_line(arguments, why, capsys):
    assert command.main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and why in captured.err


def test_sizes_of_memory():
    sizes = {"32GiB": 32 << 30, "1.5 GB": 1.5e9, "64": 64, "8kB": 8e3, "2TiB": 2 << 40, "5B": 5, "3mib": 3 << 20}
    assert {text: size_of(text, "--memory") for text in sizes} == sizes


def test_help_says_how_a_layout_is_written(capsys):
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    output = capsys.readouterr().out
    assert left.value.code == 0 and "4x2x1 zero1 mb2 1f1b" in output and "zero-bubble" in output
    assert all(len(line) <= 120 for line in output.splitlines())


def test_scaling_is_a_table_and_a_picture(tmp_path, capsys):
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
    for wrong, why in ((("--scale", "6"), "multiples of 4"), (("--scale", "8", "--nodes", "2"), "leave out --nodes")):
        assert command.main([*options, *wrong]) == 2
        assert why in capsys.readouterr().err


def test_a_busy_machine_gets_the_same_answer(capsys, monkeypatch, tmp_path):
    options = (*ASKED, "--train.batch", "16", "--out", str(tmp_path / "out.toml"))
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
def test_the_example_of_the_page_is_what_the_command_prints(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    (tmp_path / "gpt.toml").write_text(page.split("```toml\n# gpt.toml\n")[1].split("```")[0])
    asked, printed = page.split("```bash\npython -m mpitrain.plan gpt.toml ")[1].split("```text\n")[:2]
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain.plan", "gpt.toml", *asked.split("\n")[0].split()],
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
def test_a_plan_is_the_same_byte_for_byte_whatever_the_load_and_the_order_of_sets(tmp_path):
    options = ["--nodes", "1", "--ranks-per-node", "4", "--machine", "gpu-8", "--model.layers", "2"]
    results = []
    for seed, load in (("1", 0), ("2", 20)):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "mpitrain.plan", *options],
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
        ("4 GiB", "64 GiB", "2x1x1", "no layout fits in the 2 GiB of the host's memory that a rank has; "),
        ("64 GiB", "3.5 GiB", "1x1x2 offload:host", ""),
        (
            "8 GiB",
            "3.5 GiB",
            "1x1x2 offload:host",
            "no layout fits in the 4 GiB of the host's memory that a rank has; ",
        ),
    ],
)
def test_the_model_as_it_is_built_and_what_is_offloaded_have_to_fit_on_the_host(
    node, device, layout, why, capsys, monkeypatch
):
    monkeypatch.setattr(profile, "profile_of", lambda *_, **__: MadeUpModel(6, batch=16, vocabulary=1_000_000))
    assert on_devices(node, device) == (2 if why else 0)
    output, error = capsys.readouterr()
    assert why in error and error.count("\n") == bool(why)
    assert error.count("most of it " + ("states" if "offload" in layout else "model")) == bool(why)
    assert (" on the host, " in output) or not why
    assert on_devices(node, device, "--explain", layout) == 0
    output, _ = capsys.readouterr()
    assert ("does not fit" in output) == (" on the host, " in output) == bool(why)
