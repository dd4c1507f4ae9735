"""Limits how long MPI's TCP connections wait for a host that is silent.

A host that is switched off or cut off ends no connection. Linux sends what such a host does not acknowledge again and
again for a quarter of an hour, Open MPI sets no limit of its own, and a rank that only receives hears nothing at all.
So each connection of MPI's gets a user timeout (RFC 5482; tcp(7): TCP_USER_TIMEOUT) and, for times in which it
carries nothing, probes. It is the kernel of the other host that answers: a rank there may compute for as long as it
likes. A connection that is given up is a process failure to Open MPI (with fault tolerance), raised where it is used.

The process may have other connections, which are not to be touched. MPI's are known by their ports: as it starts, MPI
opens those at which it listens, and each of its connections ends, here or there, at one of them.
"""

from __future__ import annotations

import functools
import gc
import ipaddress
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from mpitrain.comm.job import arrival
from mpitrain.storage import proc

_AGAIN = 2.0  # seconds after which connections that were made meanwhile are looked for
_DESCRIPTORS = "/proc/self/fd"
_CALLING = "02"  # SYN_SENT in /proc/net/tcp
_LOCAL = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")  # in /proc/net/fib_trie

End = tuple[str, int]  # address and port


@functools.cache
def start_mpi() -> frozenset[int]:
    """Start MPI, as importing mpi4py does; returns the ports at which it listens.

    Where MPI was started before, those at which something listens that is not of Python's.
    """
    if "mpi4py.MPI" in sys.modules:
        of_python = [own.fileno() for own in gc.get_objects() if issubclass(type(own), socket.socket)]
        others = {_socket_at(str(descriptor)) for descriptor in of_python}
    else:
        others = set(_listening())
    if arrival.is_due():
        arrival.start_mpi()
    from mpi4py import MPI  # noqa: F401

    return frozenset(port for name, port in _listening().items() if name not in others)


def find(nodes: Sequence[int], node: int, all_gather_object: Callable[[Any], list[Any]]) -> Connections:
    """Return MPI's connections between the ranks. Collective.

    Args:
        nodes: The node of each rank.
        node: The node of this rank.
        all_gather_object: As of the world's communicator.
    """
    told = all_gather_object([sorted(start_mpi()), _addresses()])
    far = {
        (address, port)
        for rank, (ports, addresses) in enumerate(told)
        for address in addresses
        for port in ports
        if nodes[rank] == node or not ipaddress.ip_address(address).is_loopback
    }
    return Connections(start_mpi(), frozenset(far))


class Connections:
    """MPI's connections from this process to others."""

    def __init__(self, near: frozenset[int], far: frozenset[End]) -> None:
        """Note by what they are known.

        Args:
            near: Ports of this process at which MPI listens.
            far: Addresses and ports at which it does on other ranks.
        """
        self._near, self._far = near, far
        self._limited = 0.0  # time.monotonic() of the last time

    def limit(self, seconds: float, *, now: bool = False) -> None:
        """Give up those that are silent for too long. To be called again and again: connections are made on demand.

        Args:
            seconds: How long they may be silent.
            now: Whether to look for new ones at once.
        """
        if not now and time.monotonic() - self._limited < _AGAIN:
            return
        self._limited = time.monotonic()
        for name, connection in _connections():
            with suppress(OSError):  # closed meanwhile
                if connection.getsockname()[1] in self._near or _far_end(name, connection) in self._far:
                    _limit(connection, seconds)


def _socket_at(descriptor: str) -> str:
    """socket:[NUMBER] of a descriptor that is one; the number is the socket's own."""
    with suppress(OSError):
        name = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
        return name if name.startswith("socket:") else ""
    return ""


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """The TCP sockets of this process, one after the other."""
    for descriptor in os.listdir(_DESCRIPTORS):
        name = _socket_at(descriptor)
        if name:
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield name, found


def _listening() -> dict[str, int]:
    """The ports at which this process listens, by the names of the sockets."""
    return {name: connection.getsockname()[1] for name, connection in _connections() if _listens(connection)}


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _far_end(name: str, connection: socket.socket) -> End | None:
    """Where a connection leads, or is to lead; None for one that leads nowhere."""
    try:
        address, port = connection.getpeername()[:2]
        return address.partition("%")[0], port  # without the interface of a link-local one
    except OSError:
        return None if _listens(connection) else _called().get(name)


def _called() -> dict[str, End]:
    """Whom this host's sockets are calling that have had no answer yet, by the sockets' names."""
    called = {}
    for table in ("tcp", "tcp6"):
        for row in proc.read(f"self/net/{table}").splitlines():
            fields = row.split()
            if fields[3] == _CALLING:
                address, _, port = fields[2].partition(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                called[f"socket:[{fields[9]}]"] = str(ipaddress.ip_address(b"".join(words))), int(port, 16)
    return called


def _addresses() -> list[str]:
    """The addresses of this host."""
    rows = proc.read("net/if_inet6").splitlines()
    of_6 = {str(ipaddress.ip_address(bytes.fromhex(row.split()[0]))) for row in rows}
    return sorted({*_LOCAL.findall(proc.read("net/fib_trie")), *of_6})


def _limit(connection: socket.socket, seconds: float) -> None:
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(tcp, socket.TCP_SYNCNT, max(1, (int(seconds) + 1).bit_length() - 2))  # after 1, 2, 4, ... s
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
