"""Pushing gradients to a rank that serves and pulling parameters: parallel.mode server beside torch's RPC.

Rank 0 is the server; all other ranks are workers, which push and pull at the same time. These contenders are timed for
each size (bytes that each worker moves):

    memcpy                 copies of the same number of bytes within the worker's own memory
    torch rpc              torch.distributed.rpc over TensorPipe, as in torch's tutorial of a parameter server
    parallel.mode server   shared memory between ranks of a node, messages between nodes

A push ends when the server has updated its parameters by SGD, a pull when the worker has the parameters. Each contender
has its own memory and is measured by single calls, in turns with all others, so that from 4 MiB on nothing is in the
caches. A check before the measurement verifies that the pulled parameters are those of one update.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.runner.jobs import BenchmarkParser, run, summaries, timed
from benchmarks.runner.peers import rpc
from benchmarks.runner.report import Report, ReportTable
from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.errors import CommunicationError
from mpitrain.loose.clock import Clock, Commit, History, Portion
from mpitrain.loose.server import ServedWorker, Server
from mpitrain.loose.sharding import Roles, ServedSharding, ServerShares
from mpitrain.measuring.self_start import byte_sizes, temporary_folder
from mpitrain.storage.text import bytes_text

SERVER = 0  # the rank that serves; the others are workers


class Desk:
    """The roles of the ranks, and messages between server and workers, shared by all contenders.

    Attributes:
        world: Communicator of all ranks.
        serves: True on the server.
        row: Number of this worker, from 0; -1 on the server.
        workers: Number of workers.
        numel: Number of fp32 elements of a gradient.
    """

    def __init__(self, world: Communicator, numel: int) -> None:
        self.world, self.numel = world, numel
        self.serves, self.row, self.workers = world.rank == SERVER, world.rank - 1, world.size - 1
        self._questions, self._answers = world.mailbox("questions"), world.mailbox("answers")

    def meet(self, *, answered: bool = False) -> None:
        """Synchronize: the server waits for a message from each worker. Collective.

        Args:
            answered: If true, the workers also wait for an answer of the server.
        """
        if self.serves:
            for _ in range(self.workers):
                letter = self._questions.wait(range(1, self.world.size), "questions")
                if answered:
                    self._answers.post(letter.source, [])
        else:
            self._questions.post(SERVER, [self.row])
            if answered:
                self._answers.wait([SERVER], "an answer")

    def free(self) -> None:
        """Free the mailboxes. Collective."""
        for box in (self._questions, self._answers):
            box.free()


# Each contender has the worker's gradient x, which is pushed, and its parameters y after a pull. The methods are
# collective.


class Memcpy:
    """The contender that copies within the worker's own memory; the server does nothing."""

    def __init__(self, desk: Desk) -> None:
        self._serves, self._place = desk.serves, torch.zeros(desk.numel)
        self.x = self.y = torch.zeros(desk.numel)

    def push(self) -> None:
        """Copy the gradient to another buffer of the worker."""
        if not self._serves:
            self._place.copy_(self.x)

    def pull(self) -> None:
        """Copy the buffer to the worker's parameters."""
        if not self._serves:
            self.y.copy_(self._place)


# parameters for each worker, on the server; global, because torch's RPC calls functions of a module by name
_parameters: list[torch.Tensor] = []


def _give(row: int) -> torch.Tensor:
    return _parameters[row]


def _update(row: int, gradient: torch.Tensor) -> None:
    """Update the server's parameters for one worker by SGD with a learning rate of 1.

    Args:
        row: Number of the worker.
        gradient: Gradient that the worker sent.
    """
    _parameters[row].sub_(gradient)


class TorchRpc:
    """The contender torch.distributed.rpc, used as in torch's tutorial of a parameter server.

    Workers call functions of the server. Received tensors stay in the memory that torch allocated for them.
    """

    def __init__(self, desk: Desk, module: Any) -> None:
        self._desk, self._rpc, self.x = desk, module, torch.zeros(desk.numel)
        _parameters[:] = torch.zeros(desk.workers if desk.serves else 0, desk.numel)

    def push(self) -> None:
        """Push the gradient `x` and wait until the server has updated its parameters; `x` may then be overwritten."""
        if not self._desk.serves:
            self._rpc.rpc_sync(str(SERVER), _update, args=(self._desk.row, self.x))
        self._desk.meet()

    def pull(self) -> None:
        """Pull the parameters from the server into `y`."""
        if not self._desk.serves:
            self.y = self._rpc.rpc_sync(str(SERVER), _give, args=(self._desk.row,))
        self._desk.meet()


class ModeServer:
    """The contender parallel.mode server, with one server that updates by SGD with a learning rate of 1."""

    def __init__(self, desk: Desk) -> None:
        self._desk, world = desk, desk.world
        ranks = [rank for rank in range(world.size) if rank != SERVER]
        roles, module = Roles(tuple(ranks), (SERVER,)), nn.ParameterList([nn.Parameter(torch.zeros(desk.numel))])
        alone = world.subgroup([world.rank])
        assert alone is not None
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        self._sharding = ServedSharding(module, optimizer, alone, Config(), world, roles)
        self._boxes = world.mailbox("to servers"), world.mailbox("to workers")
        flats, self._buckets = self._sharding.flats, range(len(self._sharding.flats.buckets))
        self._step = 0
        self._worker = ServedWorker(roles, flats, self._boxes, False, lambda: None)
        self._server = self._make_server(roles) if desk.serves else None
        self.x, self.y = (of[0].tensor[: desk.numel] for of in (flats.gradients, flats.parameters))

    def _make_server(self, roles: Roles) -> Server:
        groups, flats, update = self._sharding.groups, self._sharding.flats, self._sharding.update
        assert update is not None
        inbox = {w: ServerShares(groups, 0, [torch.float32]) for w in roles.workers if not flats.can_access(w)}
        history, bytes_between = History(len(roles.workers), 0), dict.fromkeys(roles.workers, 0)
        clock = Clock(history.applied(), roles.workers, None)
        asynchronous = {"mode": "server", "staleness": "none"}
        config = Config.from_dict({"parallel": asynchronous, "train": {"clip": 0.0}})
        return Server(0, roles, flats, update, self._boxes, history, clock, config, 0, bytes_between, inbox)

    def push(self) -> None:
        """Push the gradient `x` and wait until the server has updated its parameters; `x` may then be overwritten."""
        self._step += 1
        if self._server is not None:
            while self._server.applied.completed < self._step:
                self._server.process_messages()
            self._desk.meet(answered=True)
            return
        weight = 1.0 / self._desk.workers
        self._worker.portion = Portion(self._step, self._desk.row)
        for bucket in self._buckets:
            self._worker.push(bucket)
        self._worker.commit(Commit(self._step, self._desk.row, 1.0, weight, weight, 0.0, 0.0, 0.0, 0.0))
        self._desk.meet(answered=True)

    def pull(self) -> None:
        """Pull the parameters from the server into `y`."""
        if self._server is not None:
            while self._server.finals < self._desk.workers:
                self._server.process_messages()
            self._server.finals = 0
        else:
            self._worker.pull(0, final=True)
            self._worker.wait_for(self._buckets)
            self._worker.handle_messages()

    def free(self) -> None:
        """Free the memory. Collective."""
        self._sharding.close()
        for box in self._boxes:
            box.free()


Carrier = Memcpy | TorchRpc | ModeServer


@contextmanager
def carriers(world: Communicator, numel: int, folder: Path) -> Iterator[dict[str, Carrier]]:
    """Yield all contenders by name. Collective.

    Args:
        world: Communicator of all ranks.
        numel: Number of fp32 elements of a gradient.
        folder: Empty folder on a file system that all ranks share.
    """
    desk = Desk(world, numel)
    with rpc(world, folder) as module:
        by_name: dict[str, Carrier] = {"memcpy": Memcpy(desk), "torch rpc": TorchRpc(desk, module)}
        by_name["parallel.mode server"] = served = ModeServer(desk)
        for name, mean in (("torch rpc", desk.row + 1), ("parallel.mode server", (desk.workers + 1) / 2)):
            _check(name, by_name[name], desk, mean)
        yield by_name
        served.free()
        desk.free()


def _check(name: str, carrier: Carrier, desk: Desk, mean: float) -> None:
    """Raise CommunicationError unless a push and a pull give the parameters of one update. Collective.

    Args:
        name: Name of the contender, for the error.
        carrier: The contender.
        desk: Roles of the ranks.
        mean: Expected mean of the gradients; the parameters must be -mean.
    """
    carrier.x.fill_(float(desk.row + 1))
    carrier.push()
    desk.world.barrier()
    carrier.pull()
    good = desk.serves or carrier.y.equal(torch.full_like(carrier.y, -mean))
    desk.world.agree(None if good else CommunicationError(f"{name}: pulled parameters differ from the updated ones"))


SIZES = (64 << 10, 1 << 20, 16 << 20)
QUICK_SIZES = (1 << 20,)
_ACTS = ("push", "pull")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what = "Compare pushes to and pulls from a server, with each transport."
    parser = BenchmarkParser(
        "server", what, "2", repeats=31, seconds=60.0, of="one size", quick=(5, 60.0), too_few="a server needs workers"
    )
    parser.add("sizes", type=byte_sizes, metavar="S,S", help="bytes that a worker moves [64Ki,1Mi,16Mi]")
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time a push and a pull by each contender at each size. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Median and best seconds, by size, contender and push or pull.
    """
    result: dict[str, Any] = {}
    for size in options.sizes or (QUICK_SIZES if options.quick else SIZES):
        with temporary_folder(world, options.out) as folder, carriers(world, size // 4, folder) as ways:
            calls = {f"{act} {name}": getattr(way, act) for name, way in ways.items() for act in _ACTS}
            times = summaries(timed(world, bytes_text(size), calls, options, begins=world.rank != SERVER))
            result[str(size)] = {way: {act: times[f"{act} {way}"] for act in _ACTS} for way in ways}
    return result


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Return the report with tables.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables = []
    for ranks, result in results.items():
        for size, ways in result.items():
            rows = []
            for way, times in ways.items():
                ms, copies = ([of[act]["median"] * 1e3 for act in _ACTS] for of in (times, ways["memcpy"]))
                rows.append((way, *(cell for a, b in zip(ms, copies, strict=True) for cell in (a, a / b))))
            columns = ("carried by", "push, ms", "/ memcpy", "pull, ms", "/ memcpy")
            tables.append(ReportTable(f"{bytes_text(int(size))}, {ranks} ranks", columns, rows, "Medians."))
    return Report("Pushing to and pulling from a server", tables)
