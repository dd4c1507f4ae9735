"""Popular training libraries run unchanged over this backend. Each test needs its library installed."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import ROOT
from warm import job

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.campaign


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed (pip install accelerate)")
def test_accelerate_trains_and_gathers():
    result = job(2, [sys.executable, "-m", "mpitrain.backend", str(SCRIPTS / "with_accelerate.py")])
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"DistributedDataParallel MPIProcessGroup 64 ([0-9.]+)", result.stdout)
    assert len(losses) == 2
    assert all(float(loss) < 0.1 for loss in losses)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed (pip install accelerate)")
@pytest.mark.parametrize("launcher", ["accelerate launch", "torchrun"])
def test_other_launchers_are_refused_with_the_mpirun_command(tmp_path, launcher):
    script = tmp_path / "train.py"
    script.write_text("import mpitrain.backend\nprint('alive')\n")
    options = {
        "accelerate launch": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    result = job(1, [sys.executable, "-m", *options[launcher], str(script)], PYTHONPATH=str(ROOT))
    assert result.returncode != 0 and "alive" not in result.stdout, result.stdout
    messages = [line for line in result.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert len(messages) == 1 and "mpirun -n N python -m mpitrain.backend train.py" in messages[0], result.stderr
    assert "InputError" not in result.stderr


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed (pip install lightning)")
def test_lightning_trains_with_its_ddp_strategy():
    result = job(2, [sys.executable, str(SCRIPTS / "with_lightning.py"), "2"])
    assert result.returncode == 0, result.stderr
    assert len(set(re.findall(r"2 ranks, 8 steps, loss ([0-9.]+) MPIProcessGroup", result.stdout))) == 1, result.stdout
