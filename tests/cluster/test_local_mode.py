"""parallel.mode local between nodes with a slow link: 1 Gbit/s, 10 ms."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch
from cluster.conftest import impossible
from link import Link
from namespace_hosts import Hosts, why_not
from support import train_command

from mpitrain.data.prepare import prepare
from mpitrain.monitor import read_metrics

LINK = Link(bits_per_second=1e9, seconds=0.010)
STEPS = 16
MODEL = ["--model.layers", "2", "--model.width", "512", "--model.sequence", "16", "--train.batch", "6"]
RUN = ["--train.steps", str(STEPS), "--train.evaluate_samples", "24", "--checkpoint.every", "0"]
LOCAL = ["--parallel.mode", "local", "--parallel.local_group", "node", "--parallel.local_steps", "8"]


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_local_mode_is_faster_over_a_slow_link(tmp_path, forked):
    if reason := why_not(LINK):
        impossible("namespaces", reason)
    data, results = tmp_path / "text", {}
    prepare([str(Path(torch.__file__).with_name("functional.py"))], data)
    with Hosts(3, LINK) as hosts:
        for name, words in {"sync": [], "local": LOCAL}.items():
            where = ["--data.path", str(data), "--run.dir", str(tmp_path / name)]
            result = hosts.run(forked.replace_python(train_command(*MODEL, *RUN, *where, *words)), timeout=180)
            assert result.returncode == 0, result.stderr
            lines = read_metrics(tmp_path / name)
            speed = median(line["tokens_per_s"] for line in lines[STEPS // 2 :])
            results[name] = speed, lines[-1]["loss"], lines[-1]["held_out_loss"]
    print({name: [round(figure, 4) for figure in figures] for name, figures in results.items()})
    # all hosts compute on the same cores: the busier these are, the less of a step is spent on the link
    assert results["local"][0] > 1.5 * results["sync"][0], results
    assert results["local"][2] < results["sync"][2] + 0.3, results
