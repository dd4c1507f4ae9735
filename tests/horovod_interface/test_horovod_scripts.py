"""Unchanged scripts for Horovod under mpitrain.run: they run, and an error of one rank ends all with one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import one_line
from warm import job

pytestmark = [pytest.mark.serial, pytest.mark.timeout(60)]

ERRORS = {
    "shapes": ('hvd.allreduce(torch.ones(1 + rank), name="x")', ["float32 [1] on cpu", "but rank 1"], 1),
    "names": ('hvd.allreduce(torch.ones(1), name=f"x{rank}")', ["rank 0 waits for 'allreduce.x0'; rank 1 waits"], 1),
    "argument": ("hvd.allgather(torch.ones(1).sum() if rank else torch.ones(1))", ["rank 1: allgather: a scalar"], 2),
    "joined": ("hvd.join() if rank else hvd.allgather(torch.ones(1))", ["impossible after rank 1 has joined"], 1),
    "left": ("hvd.join() if rank else hvd.shutdown()", ["rank 1: rank 0 has called hvd.shutdown()"], 1),
    "waiting": (
        'a = hvd.allreduce_async(torch.ones(1 + rank), name="a")\n'
        'hvd.synchronize(a) if rank else hvd.allreduce(torch.ones(1), name="b")',
        ["rank 1: rank 0 has submitted allreduce 'allreduce.a'"],
        1,
    ),
    "value": (
        "hvd.allgather_object(hvd if rank else 0)",
        ["rank 1: a value of type builtins.module"],
        2,
    ),
}
BEGINNING = "import torch, horovod.torch as hvd\nhvd.init()\nrank = hvd.rank()\n"


def run(folder: Path, text: str):
    script = folder / "script.py"
    script.write_text(BEGINNING + text)
    return job(2, [sys.executable, "-m", "mpitrain.run", str(script)], cwd=folder, timeout=50)


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_of_one_rank_is_one_line_of_all(case, tmp_path):
    text, words, code = ERRORS[case]
    one_line(run(tmp_path, text), *words, code=code, alone=False)


def test_a_script_imports_horovod_by_all_of_its_names(tmp_path):
    done = run(
        tmp_path,
        "import horovod\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "from horovod.torch.elastic.sampler import ElasticSampler\n"
        "assert horovod.torch is hvd and issubclass(HorovodInternalError, RuntimeError) and len(ElasticSampler('ab'))\n"
        "print('sum', int(hvd.allreduce(torch.tensor([rank + 1]), op=hvd.Sum)))\n",
    )
    assert done.returncode == 0 and done.stdout.count("sum 3") == 2, done.stderr
