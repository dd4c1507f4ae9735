"""What is done so that a host that falls silent is noticed, and so that mpirun ends without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from mpitrain.comm import launcher
from mpitrain.comm.connections import Connections


def _user_timeout(connection):
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_every_tcp_connection_is_limited_and_nothing_else_is_touched():
    listening = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listening.getsockname())
    far, _ = listening.accept()
    pair = socket.socketpair()
    pipe = os.pipe()
    connections = Connections()
    connections.limit(30)
    assert [_user_timeout(c) for c in (listening, near, far)] == [30_000] * 3
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    late = socket.create_connection(listening.getsockname())
    later, _ = listening.accept()
    connections.limit(2)
    assert _user_timeout(later) == 30_000 and _user_timeout(late) == 0  # so soon nothing is looked for
    connections.limit(2, now=True)
    assert [_user_timeout(c) for c in (near, far, late, later)] == [2_000] * 4
    near.sendall(b"as before")
    assert far.recv(20) == b"as before"
    assert near.getblocking() and pair[0].getblocking()
    for opened in (listening, near, far, late, later, *pair):
        opened.close()
    for end in pipe:
        os.close(end)


def test_mpirun_is_ended_unless_a_rank_is_left(monkeypatch):
    monkeypatch.setattr(launcher, "_PATIENCE", 0)
    mpirun, rank = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    launcher.end_soon(mpirun.pid, unless=[rank.pid])
    time.sleep(0.5)
    assert mpirun.poll() is None
    rank.kill()
    rank.wait()
    launcher.end_soon(mpirun.pid, unless=[rank.pid])
    assert mpirun.wait(10) == -15


def test_it_is_seen_whether_mpirun_looks_for_silent_hosts():
    def looks(*words, **environment):
        command = [sys.executable, "-c", "print(flush=True); input()", *words]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment
        ) as process:
            process.stdout.readline()  # it is that program by now
            found = launcher.notices_silent_hosts(process.pid)
            process.communicate(b"\n")
        return found

    assert looks("-n", "4")
    assert looks("--prtemca", "oob_tcp_keepalive_time", "60")
    assert not looks("--prtemca", "oob_tcp_keepalive_time", "0")
    assert not looks(PRTE_MCA_oob_tcp_keepalive_time="0")


def test_there_is_no_mpirun_to_be_found_without_one(monkeypatch):
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    assert launcher.find() == 0
    monkeypatch.setenv("PMIX_NAMESPACE", f"prterun-here-{os.getppid()}@1")
    assert launcher.find() == os.getppid()
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-elsewhere-999999999@1")
    assert launcher.find() == 0
