"""Stand-in for a rank's Python: a fork of a warm process does its work; `warm.py` fills in that process' PLACE."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress


def hand_on(number, _):
    with suppress(ProcessLookupError):  # it has just ended, and its exit code is about to come
        os.kill(worker, number)


with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as place:
    place.connect("PLACE")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])  # by jobs/shielded
    request = [sys.argv[1:], os.getcwd(), dict(os.environ), 0, sorted(os.sched_getaffinity(0)), sorted(blocked)]
    socket.send_fds(place, [json.dumps(request).encode()], [0, 1, 2])
    worker = int(place.recv(64))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    code = int(place.recv(64) or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
