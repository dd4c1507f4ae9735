"""Runs a script as mpitrain.run does, and prints on rank 0 how often each class of module ran as a local region."""

import atexit
import sys
from collections import Counter

import mpitrain as mt
from mpitrain.run.__main__ import main
from mpitrain.run.regions import Region

counts: Counter[str] = Counter()
original = Region.run


def run(self, regions, call, module, leaves, spec):
    """Run the region, and count it if that succeeds."""
    out = original(self, regions, call, module, leaves, spec)
    counts.update(type(each).__name__ for each in module.modules())
    return out


Region.run = run
errors = sys.stderr
if mt.init().rank == 0:
    atexit.register(lambda: print("regions:", *(f"{k}={n}" for k, n in counts.items()), file=errors, flush=True))
main(sys.argv[1:])
