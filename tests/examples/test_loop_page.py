"""The scripts of docs/loop.md do what the page promises."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from support import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/loop.md").read_text(encoding="utf-8"), re.S)
SCRIPTS = {match[1]: block for block in BLOCKS if (match := re.match(r"# (\w+\.py): mpirun -n \d python", block))}
(FRAGMENT,) = [block for block in BLOCKS if block not in SCRIPTS.values()]


@pytest.fixture
def run(world, folder, capsys, monkeypatch):
    """Return a function that runs a script of the page on all ranks and returns its output on every rank."""
    monkeypatch.chdir(folder)

    def run(name, *arguments, code=None):
        if world.rank == 0:
            (folder / name).write_text(code or SCRIPTS[name])
        world.barrier()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        runpy.run_path(str(folder / name), run_name="__main__")
        world.barrier()
        return world.broadcast_object(capsys.readouterr().out)

    return run


def loss_in(text):
    return float(re.search(r"loss ([\d.]+)", text)[1])


@pytest.mark.ranks(2)
def test_the_loop_with_ddp_resumes_bit_by_bit(run, folder):
    assert len(SCRIPTS) == 3
    whole = run("loop_ddp.py")
    assert whole.startswith("step 40: loss ")
    (folder / "loop.pt").unlink(missing_ok=True)
    first = run("loop_ddp.py", "21")  # in the second epoch
    resumed = run("loop_ddp.py")
    assert resumed == "going on after step 21\n" + whole
    assert loss_in(whole) < 0.95 * loss_in(first)


@pytest.mark.ranks(2)
def test_the_loop_with_the_engine_resumes_and_its_fragment_is_a_step(run):
    first = run("loop_engine.py")
    assert "step 20: loss" in first and "step-00000020" in first
    states, formula = map(int, re.search(r"states: (\d+) bytes, by the formula (\d+)", first).groups())
    assert states == pytest.approx(formula, rel=0.05)
    longer = SCRIPTS["loop_engine.py"].replace("engine.close()\n", FRAGMENT + "engine.close()\n")
    resumed = run("loop_engine.py", code=longer)
    assert f"going on after step 20; kept: {{'loss': {loss_in(first):.3f}"[:-3] in resumed
    assert "step 40: loss" in resumed and "\n41 " in resumed
    assert loss_in(resumed) < 0.5 * loss_in(first)


@pytest.mark.ranks(2, 4)
def test_the_loop_on_a_mesh_resumes(run, world):
    first = run("loop_mesh.py")
    assert f"on a mesh of (1, 2, {world.size // 2})" in first
    resumed = run("loop_mesh.py")
    assert "step 40: loss" in resumed and loss_in(resumed) < 0.5 * loss_in(first)
