"""Limits how long this process's TCP connections wait for a host that is silent.

A host that is switched off or cut off ends no connection. Linux sends what such a host does not acknowledge again and
again for a quarter of an hour, Open MPI sets no limit of its own, and a rank that only receives hears nothing at all.
So each connection of the process gets a user timeout (RFC 5482; tcp(7): TCP_USER_TIMEOUT) and, for times in which it
carries nothing, probes. It is the kernel of the other host that answers: a rank there may compute for as long as it
likes. A connection that is given up is a process failure to Open MPI (with fault tolerance), raised where it is used.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

_AGAIN = 2.0  # seconds after which connections that were made meanwhile are looked for
_DESCRIPTORS = "/proc/self/fd"


class Connections:
    """The TCP connections of this process, to whatever host: which of them are MPI's cannot be known."""

    def __init__(self) -> None:
        self._limited = 0.0  # time.monotonic() of the last time

    def limit(self, seconds: float, *, now: bool = False) -> None:
        """Give up those that are silent for so long. To be called again and again: connections are made on demand.

        now: look for new ones at once.
        """
        if not now and time.monotonic() - self._limited < _AGAIN:
            return
        self._limited = time.monotonic()
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        _limit(connection, seconds)


def _limit(connection: socket.socket, seconds: float) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(tcp, socket.TCP_SYNCNT, max(1, (int(seconds) + 1).bit_length() - 2))  # after 1, 2, 4, ... s
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
