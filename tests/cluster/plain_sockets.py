"""Exchange of bytes between hosts through plain TCP sockets, in all directions at once: the fastest that is possible.

The benchmark `hosts` compares collectives with it.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import mpitrain as mt


@contextmanager
def exchange(world: mt.Communicator, nbytes: int) -> Iterator[Callable[[], None]]:
    """Yield a call that sends `nbytes` from each host to each other host and returns when all have arrived. Collective.

    The ranks of a host send equal shares: each is connected to the rank with its local rank on every other host.

    Args:
        world: All ranks; every host has the same number.
        nbytes: Bytes from one host to another.
    """
    across = world.split(world.local_rank)
    assert across is not None
    with socket.create_server((_address(), 0)) as server:
        ends = across.all_gather_object(server.getsockname())
        connections = [socket.create_connection(end) for end in ends[across.rank + 1 :]]
        connections += [server.accept()[0] for _ in range(across.rank)]
    for connection in connections:
        connection.setblocking(False)
    out, into = (memoryview(bytearray(b"1" * (nbytes // world.local_size))) for _ in range(2))
    yield partial(_exchange, connections, out, into)
    for connection in connections:
        connection.close()
    across.free()


def _exchange(connections: Sequence[socket.socket], out: memoryview, into: memoryview) -> None:
    """Send `out` on each connection, and receive as many bytes from it into `into`."""
    sent, received = (dict.fromkeys(connections, 0) for _ in range(2))
    while sent or received:
        readable, writable, _ = select.select([*received], [*sent], [])
        for connection in writable:
            sent[connection] += connection.send(out[sent[connection] :])
        for connection in readable:
            received[connection] += connection.recv_into(into[received[connection] :])
        sent, received = ({c: n for c, n in of.items() if n < len(out)} for of in (sent, received))


def _address() -> str:
    """Return the address of this host from which it reaches the first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((os.environ["MPITRAIN_FIRST_HOST"], 9))  # namespace_hosts.py sets it; nothing is sent
        return str(asker.getsockname()[0])
