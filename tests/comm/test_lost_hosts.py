"""Settings by which a silent host is noticed, and by which mpirun ends without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
from support import ROOT
from support import launcher as start
from warm import job

from mpitrain.comm.job import arrival, launcher
from mpitrain.comm.job.connections import Connections


def _user_timeout(connection):
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_time_limit_applies_only_to_mpi_connections():
    listening = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listening.getsockname())
    far, _ = listening.accept()
    pair = socket.socketpair()
    pipe = os.pipe()
    other = socket.create_server(("127.0.0.1", 0))
    others = [other, socket.create_connection(other.getsockname()), other.accept()[0]]
    connections = Connections(frozenset([listening.getsockname()[1]]), frozenset([listening.getsockname()]))
    connections.limit(30)
    assert [_user_timeout(c) for c in (listening, near, far)] == [30_000] * 3
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    late = socket.create_connection(listening.getsockname())
    later, _ = listening.accept()
    connections.limit(2)
    assert _user_timeout(later) == 30_000 and _user_timeout(late) == 0  # so soon nothing is looked for
    connections.limit(2, now=True)
    assert [_user_timeout(c) for c in (near, far, late, later)] == [2_000] * 4
    assert [_user_timeout(c) for c in others] == [0] * 3
    near.sendall(b"as before")
    assert far.recv(20) == b"as before"
    assert near.getblocking() and pair[0].getblocking()
    for opened in (listening, near, far, late, later, *pair, *others):
        opened.close()
    for end in pipe:
        os.close(end)


CONNECTED = """
import os
import socket

def open_sockets():
    listening = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listening.getsockname())
    far = listening.accept()[0].detach()  # as if a library in C had opened it
    return [listening.fileno(), near.fileno(), far], (listening, near)

earlier, _references = open_sockets()
import torch
import mpitrain as mt
from mpitrain.comm.job import connections

world = mt.init()
later, _more_references = open_sockets()
x = torch.ones(100_000)
world.all_reduce(x, algorithm="mpi")
mpi_connections = connections.find(world.nodes, world.node, world.all_gather_object)
mpi_connections.limit(7, now=True)

def timeout(descriptor):
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        return opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

assert [timeout(d) for d in earlier + later] == [0] * 6
sockets = [int(d) for d in os.listdir("/proc/self/fd") if connections._socket_at(d)]
limited = [d for d in sockets if timeout(d) == 7000]
endpoints = [connections._remote_endpoint("", s) for s in (socket.socket(fileno=os.dup(d)) for d in limited)]
print("limited", len([end for end in endpoints if end]), flush=True)
world.barrier()
"""


@pytest.mark.skipif(not start(1)[0].endswith("mpirun"), reason="Open MPI's settings and connections")
def test_user_sockets_get_no_time_limit(tmp_path):
    (tmp_path / "connected.py").write_text(CONNECTED)
    by_tcp = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": "lo"}
    result = job(2, [sys.executable, str(tmp_path / "connected.py")], PYTHONPATH=str(ROOT), **by_tcp)
    assert result.returncode == 0, result.stderr
    assert [int(line.split()[1]) >= 1 for line in result.stdout.splitlines()] == [True] * 2, result.stdout


def test_mpirun_is_ended_only_after_all_ranks(monkeypatch):
    monkeypatch.setattr(launcher, "_PATIENCE", 0)
    mpirun, rank = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    launcher.end_soon(mpirun.pid, unless=[rank.pid])
    time.sleep(0.5)
    assert mpirun.poll() is None
    rank.kill()
    rank.wait()
    launcher.end_soon(mpirun.pid, unless=[rank.pid])
    assert mpirun.wait(10) == -15


def test_the_process_that_ends_mpirun_is_not_taken_for_a_rank(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as mpirun:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        launcher.end_soon(mpirun.pid)  # in a few seconds
        ranks = arrival.neighbours(os.getpid())
        mpirun.kill()
    assert ranks == []


def test_notices_silent_hosts_reads_the_settings_of_mpirun():
    def notices_hosts(*words, **environment):
        command = [sys.executable, "-c", "print(flush=True); input()", *words]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment
        ) as process:
            process.stdout.readline()  # it is that program by now
            notices = launcher.notices_silent_hosts(process.pid)
            process.communicate(b"\n")
        return notices

    assert notices_hosts("-n", "4")
    assert notices_hosts("--prtemca", "oob_tcp_keepalive_time", "60")
    assert not notices_hosts("--prtemca", "oob_tcp_keepalive_time", "0")
    assert not notices_hosts(PRTE_MCA_oob_tcp_keepalive_time="0")


def test_find_mpirun_returns_zero_without_mpirun(monkeypatch):
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    assert launcher.find_mpirun() == 0
    monkeypatch.setenv("PMIX_NAMESPACE", f"prterun-here-{os.getppid()}@1")
    assert launcher.find_mpirun() == os.getppid()
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-elsewhere-999999999@1")
    assert launcher.find_mpirun() == 0
