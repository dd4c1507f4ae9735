"""Scripts that import deepspeed run unchanged by `python -m mpitrain.run`."""

from __future__ import annotations

import json
import sys

import pytest
from support import one_line
from warm import job

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]
SCRIPT = """\
import argparse, os, torch, deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.utils import set_random_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed(dist_backend="nccl")
assert args.local_rank == int(os.environ["LOCAL_RANK"]) == dist.get_rank() and args.deepspeed
get_accelerator().set_device(args.local_rank)
set_random_seed(3)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
engine, optimizer, loader, _ = deepspeed.initialize(args, model, training_data=data)
for epoch in range(2):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
engine.eval()
with torch.no_grad():
    seen = sum(len(inputs) for inputs, _ in DataLoader(data, 16, num_workers=2))
deepspeed.utils.log_dist(f"{engine.global_steps} steps, {seen} samples, {float(engine(x).mean()):.6f}", ranks=[0])
assert isinstance(deepspeed.pipe.PipelineModule([LayerSpec(torch.nn.Linear, 4, 1)], num_stages=1), PipelineModule)
try:
    import deepspeed.nvme
except ImportError as error:
    print(error)
"""


def run(ranks, folder, script, *words):
    (folder / "script.py").write_text(script)
    return job(ranks, [sys.executable, "-m", "mpitrain.run", "script.py", *words], cwd=folder, timeout=100)


def test_a_script_runs_with_the_names_that_it_imports(tmp_path):
    values = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_print": 4}
    values |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    done = run(2, tmp_path, SCRIPT, "--deepspeed", "--deepspeed_config", "ds.json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "script.py is a script for DeepSpeed" in done.stderr
    for line in ("step 4, skipped 0, lr [0.1]", "[Rank 0] 8 steps, 64 samples, ", "mpitrain has no deepspeed.nvme; "):
        assert line in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import deepspeed\ndeepspeed.init_inference(None)\n", ("deepspeed.init_inference", "mt.load_model")),
        ("from deepspeed.ops.adam import FusedAdam\n", ("deepspeed.ops", "torch.optim")),
        (
            "import deepspeed, torch\ndeepspeed.initialize(model=torch.nn.Linear(1, 1), config={'train_batch_size': 2,"
            " 'optimizer': {'type': 'OneBitAdam'}, 'hybrid_engine': {'enabled': True}})\n",
            ("OneBitAdam", "AdamW", "hybrid_engine", "mpitrain.generate"),
        ),
    ],
)
def test_what_is_missing_is_one_line(script, words, tmp_path):
    one_line(run(2, tmp_path, script), *words, alone=False)
