"""Time limits on MPI's TCP connections, for hosts that stop answering.

A host that is switched off or cut off does not close its connections. Linux retransmits unacknowledged data for a
quarter of an hour, Open MPI sets no limit of its own, and a rank that only receives notices nothing at all. Therefore
each TCP connection of MPI gets a user timeout (RFC 5482; tcp(7): TCP_USER_TIMEOUT) and, for idle times, keepalive
probes. The kernel of the other host answers these, so a rank there may compute as long as it likes. Open MPI with fault
tolerance treats a closed connection as a process failure, and raises it in operations that use the connection.

Other connections of this process must not be changed. MPI's are recognized by their ports: MPI opens its listening
ports as it starts, and each of its connections ends at such a port, on this rank or on the other.
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

_SEARCH_INTERVAL = 2.0  # seconds between searches for new connections
_DESCRIPTORS = "/proc/self/fd"
_SYN_SENT = "02"  # SYN_SENT in /proc/net/tcp
_LOCAL = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")  # in /proc/net/fib_trie

Endpoint = tuple[str, int]  # address and port


@functools.cache
def start_mpi() -> frozenset[int]:
    """Start MPI, as importing mpi4py does, and return the ports at which it listens.

    If MPI is already running, return all listening ports of this process that do not belong to a Python socket.
    """
    if "mpi4py.MPI" in sys.modules:
        of_python = [candidate.fileno() for candidate in gc.get_objects() if issubclass(type(candidate), socket.socket)]
        others = {_socket_at(str(descriptor)) for descriptor in of_python}
    else:
        others = set(_listening_ports())
    if arrival.is_due():
        arrival.start_mpi()
    from mpi4py import MPI  # noqa: F401

    return frozenset(port for name, port in _listening_ports().items() if name not in others)


def find(nodes: Sequence[int], node: int, all_gather_object: Callable[[Any], list[Any]]) -> Connections:
    """Return MPI's connections between the ranks. Collective.

    Args:
        nodes: Node of each rank.
        node: Node of this rank.
        all_gather_object: `Communicator.all_gather_object` of the world.
    """
    reports = all_gather_object([sorted(start_mpi()), _addresses()])
    remote_endpoints = {
        (address, port)
        for rank, (ports, addresses) in enumerate(reports)
        for address in addresses
        for port in ports
        if nodes[rank] == node or not ipaddress.ip_address(address).is_loopback
    }
    return Connections(start_mpi(), frozenset(remote_endpoints))


class Connections:
    """TCP connections of MPI from this process to others."""

    def __init__(self, local_ports: frozenset[int], remote_endpoints: frozenset[Endpoint]) -> None:
        """Store the addresses by which MPI's connections are recognized.

        Args:
            local_ports: Ports of this process at which MPI listens.
            remote_endpoints: Addresses and ports at which MPI listens on other ranks.
        """
        self._local_ports, self._remote_endpoints = local_ports, remote_endpoints
        self._last_search = 0.0  # time.monotonic() of the last search

    def limit(self, seconds: float, *, now: bool = False) -> None:
        """Set the time limit on all current connections. Call it periodically, because MPI connects on demand.

        Args:
            seconds: Time after which a connection that gets no answer is closed.
            now: If true, search for new connections even if the last search was a moment ago.
        """
        if not now and time.monotonic() - self._last_search < _SEARCH_INTERVAL:
            return
        self._last_search = time.monotonic()
        for name, connection in _connections():
            with suppress(OSError):  # closed meanwhile
                is_listed = connection.getsockname()[1] in self._local_ports
                if is_listed or _remote_endpoint(name, connection) in self._remote_endpoints:
                    _set_time_limit(connection, seconds)


def _socket_at(descriptor: str) -> str:
    """Return the name socket:[INODE] of a file descriptor that is a socket; empty for any other."""
    with suppress(OSError):
        name = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
        return name if name.startswith("socket:") else ""
    return ""


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """Yield the TCP sockets of this process, with their names."""
    for descriptor in os.listdir(_DESCRIPTORS):
        name = _socket_at(descriptor)
        if name:
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    yield name, connection


def _listening_ports() -> dict[str, int]:
    """Return the ports at which this process listens, by socket name."""
    return {name: connection.getsockname()[1] for name, connection in _connections() if _is_listening(connection)}


def _is_listening(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _remote_endpoint(name: str, connection: socket.socket) -> Endpoint | None:
    """Return the remote end of a connection, even if it is not established yet; None for a listening socket."""
    try:
        address, port = connection.getpeername()[:2]
        return address.partition("%")[0], port  # without the interface of a link-local address
    except OSError:
        return None if _is_listening(connection) else _pending_endpoints().get(name)


def _pending_endpoints() -> dict[str, Endpoint]:
    """Return the remote ends of this host's connection attempts that have had no answer yet, by socket name."""
    called = {}
    for table in ("tcp", "tcp6"):
        for row in proc.read(f"self/net/{table}").splitlines():
            fields = row.split()
            if fields[3] == _SYN_SENT:
                address, _, port = fields[2].partition(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                called[f"socket:[{fields[9]}]"] = str(ipaddress.ip_address(b"".join(words))), int(port, 16)
    return called


def _addresses() -> list[str]:
    """Return the IP addresses of this host."""
    rows = proc.read("net/if_inet6").splitlines()
    of_6 = {str(ipaddress.ip_address(bytes.fromhex(row.split()[0]))) for row in rows}
    return sorted({*_LOCAL.findall(proc.read("net/fib_trie")), *of_6})


def _set_time_limit(connection: socket.socket, seconds: float) -> None:
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(tcp, socket.TCP_SYNCNT, max(1, (int(seconds) + 1).bit_length() - 2))  # after 1, 2, 4, ... s
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
