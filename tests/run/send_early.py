"""Runs a script as mpitrain.run does on ranks with spare cores, with tiny buckets and shards, and counts buckets."""

import atexit
import sys

import mpitrain as mt
from mpitrain.comm import world
from mpitrain.run import pending, regions, zero
from mpitrain.run.__main__ import main

world.spare_cores = lambda comm, share: 1
pending.BUCKET = regions.BUCKET = 256
zero.LEAST = 1
sent = pending.PendingSums._receive
count = 0


def receive(self):
    """Wait for the buckets, and count them."""
    global count
    count += len(self._buckets)
    sent(self)


pending.PendingSums._receive = receive
errors = sys.stderr
if mt.init().rank == 0:
    atexit.register(lambda: print(f"buckets: {count}", file=errors, flush=True))
main(sys.argv[1:])
