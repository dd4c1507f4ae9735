"""Script that the campaign runs and kills: it resumes from the newest checkpoint and saves until it is killed.

endless_saves.py FOLDER SEED: the state of a step follows from the step. Writes FOLDER/pids and, once it saves,
FOLDER/saving.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from checkpoint_states import empty, in_shares, in_slices, same

import mpitrain
from mpitrain.checkpoint import Store

SHAPES = {"model/a": (50, 31), "model/b": (700,), "optimizer/m/a": (50, 31)}


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


if __name__ == "__main__":
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    comm = mpitrain.init(timeout=60)
    pids = comm.all_gather_object(os.getpid())
    layout = in_slices if seed % 2 else in_shares
    store = Store(folder / "c", comm, 2, files="node" if seed % 5 == 0 else "rank")
    store.prepare(set_aside=False)
    assert comm.on_root(lambda: not list((folder / "c").glob("*.tmp-*")))
    at = 0
    for path in store.newest_first():
        expected = layout(state(int(path.name[5:])), comm.rank, comm.size)
        filled = empty(expected)
        at = store.load(path, lambda manifest, filled=filled: filled).step
        assert same(filled, expected)
        break
    comm.on_root(lambda: (folder / "pids").write_text(" ".join(map(str, pids))) and None)
    while True:
        at += 1
        store.save(at, layout(state(at), comm.rank, comm.size), {"position": at}, background=bool(seed % 3))
        if comm.rank == 0:
            (folder / "saving").touch()
