"""Script of the campaign: endless_groups.py saves|split|subgroup TIMES FOLDER. Prints each rank's growth in KiB."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import mpitrain as mt

WARM_UP = 500  # repetitions after which caches no longer grow


def resident_kib() -> int:
    """Return the resident memory of this process in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


if __name__ == "__main__":
    kind, times, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    world = mt.init(timeout=60)
    model = torch.nn.Linear(4, 2)
    engine = mt.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"train": {"batch": world.size}})
    x = torch.ones(100)
    begun = time.monotonic()
    for number in range(times):
        if kind == "saves":
            engine.save(folder / "c")
            if number % 10 == 0:
                engine.load(folder / "c")
        else:
            group = world.split(0) if kind == "split" else world.subgroup(range(world.size))
            group.all_reduce(x, "max")
            group.all_reduce(x, "max", algorithm="ring")
            group.free()
        if number == WARM_UP:
            initial = resident_kib()
    growth = [str(kib) for kib in world.all_gather_object(resident_kib() - initial)]
    engine.close()
    if world.rank == 0:
        print("growth", *growth, f"in {time.monotonic() - begun:.0f} s")
