"""Pushing gradients to a rank that serves and pulling parameters, by each way of carrying them.

Rank 0 serves, the others push and pull, all at once. What is timed, per size (bytes that each of them moves):

    memcpy                      a worker copies as much within its own memory
    shared memory               it copies into, and out of, the server's part of an arena; a letter says when
    letters                     the payload of a letter (`mpitrain.comm.mailbox`)
    torch rpc                   torch.distributed.rpc over TensorPipe, as in torch's tutorial of a parameter server
    ..., and SGD                a push updates the parameters, too: torch rpc so, and parallel.mode server as it is

A push lasts from its beginning at a worker until the server knows that it has the gradient, a pull until the worker has
the parameters. Each way has memory of its own and is measured by single shots in turns with all others, so that from
4 MiB on nothing is in the caches. Nothing is computed with what arrives, and it is checked once that it is what was
sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.runner.jobs import BenchmarkParser, run, summaries, timed
from benchmarks.runner.peers import rpc
from benchmarks.runner.report import Panel, Report, ReportTable, milliseconds
from mpitrain.comm import Communicator, Letter
from mpitrain.errors import CommunicationError
from mpitrain.loose.clock import Clock, Portion
from mpitrain.loose.letters import Commit, Remembered, Rules
from mpitrain.loose.memory import OwnShares, Roles
from mpitrain.loose.server import Server
from mpitrain.loose.sharding import ServedSharding
from mpitrain.loose.worker import ServedWorker
from mpitrain.measuring.self_start import byte_sizes, temporary_folder
from mpitrain.shard.sharding import Options
from mpitrain.storage.text import bytes_text

SERVER = 0  # the rank that serves; the others are workers


class Carrier:
    """One way of carrying. All ranks call its methods together.

    Attributes:
        x: A worker's gradient, which is pushed, and where the parameters are that were pulled.
        rows: What each worker has pushed, on the server; that is what it pulls as well. Empty where there is no server.
    """

    def __init__(self, desk: Desk) -> None:
        """Make x and rows, in ordinary memory."""
        self._desk = desk
        self.x = torch.zeros(desk.numel)
        self.rows = list(torch.zeros(desk.workers if desk.serves else 0, desk.numel))

    def push(self) -> None:
        """Return when the server has the worker's gradient where it can read it; a worker's x may then be written."""
        raise NotImplementedError

    def pull(self) -> None:
        """Return when the worker has the parameters in its own memory."""
        raise NotImplementedError

    def free(self) -> None:
        """Release the memory. Collective."""
        self.rows = []


class Desk:
    """What carriers have in common: who is who, and letters between them.

    Attributes:
        world: The ranks.
        serves: Whether this rank is the server.
        row: Of a worker's rows.
        workers: How many there are.
        numel: Elements of a gradient.
    """

    def __init__(self, world: Communicator, numel: int) -> None:
        self.world, self.numel = world, numel
        self.serves, self.row, self.workers = world.rank == SERVER, world.rank - 1, world.size - 1
        self._questions, self._answers = world.mailbox("questions"), world.mailbox("answers")

    def ask(self, payload: torch.Tensor | None = None) -> Any:
        """A worker asks."""
        return self._questions.post(SERVER, [self.row], payload)

    def asked(self, serve: Callable[[Letter], object] | None = None) -> None:
        """The server is asked, once by each worker."""
        for _ in range(self.workers):
            letter = self._questions.wait(range(1, self.world.size), "questions")
            if serve is not None:
                serve(letter)

    def tell(self, letter: Letter, payload: torch.Tensor | None = None) -> None:
        """The server answers."""
        self._answers.post(letter.source, [], payload)

    def told(self) -> Letter:
        """The answer that a worker gets."""
        return self._answers.wait([SERVER], "an answer")

    def free(self) -> None:
        """Release the letters. Collective."""
        for box in (self._questions, self._answers):
            box.free()


class Memcpy(Carrier):
    """A worker copies from its memory to its memory."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self.rows, self._place = [], torch.zeros(desk.numel)

    def push(self) -> None:
        """See `Carrier.push`."""
        if not self._desk.serves:
            self._place.copy_(self.x)

    def pull(self) -> None:
        """See `Carrier.pull`."""
        if not self._desk.serves:
            self.x.copy_(self._place)


class SharedMemory(Carrier):
    """A worker copies into and out of the server's part of an arena; letters say when."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._arena = desk.world.arena(desk.workers * desk.numel)
        self.rows = list(self._arena.peer(desk.world.world_ranks[SERVER]).view(desk.workers, desk.numel))

    def push(self) -> None:
        """See `Carrier.push`."""
        if self._desk.serves:
            self._desk.asked()
        else:
            self.rows[self._desk.row].copy_(self.x)
            self._desk.ask()

    def pull(self) -> None:
        """See `Carrier.pull`."""
        if self._desk.serves:
            self._desk.asked(self._desk.tell)
        else:
            self._desk.ask()
            self._desk.told()
            self.x.copy_(self.rows[self._desk.row])

    def free(self) -> None:
        """See `Carrier.free`."""
        super().free()
        self._arena.free()


class Letters(Carrier):
    """Gradients and parameters are payloads of letters."""

    def push(self) -> None:
        """See `Carrier.push`."""
        if self._desk.serves:
            self._desk.asked(lambda letter: letter.receive(self._of(letter)).wait())
        else:
            self._desk.ask(self.x).wait()

    def pull(self) -> None:
        """See `Carrier.pull`."""
        if self._desk.serves:
            self._desk.asked(lambda letter: self._desk.tell(letter, self._of(letter)))
        else:
            self._desk.ask()
            self._desk.told().receive(self.x).wait()

    def _of(self, letter: Letter) -> torch.Tensor:
        return self.rows[int(letter.words[0])]


_held: list[torch.Tensor] = []  # what workers pushed by rpc: torch calls functions of the module by their names


def _keep(row: int, gradient: torch.Tensor) -> None:
    """The server takes what it was sent as it is, without a copy of its own."""
    _held[row] = gradient


def _give(row: int) -> torch.Tensor:
    return _held[row]


def _update(row: int, gradient: torch.Tensor) -> None:
    """The server descends along what it was sent, as SGD with a learning rate of 1."""
    _held[row].sub_(gradient)


class TorchRpc(Carrier):
    """torch.distributed.rpc, as its tutorial of a parameter server has it: workers call functions of the server.

    What arrives is in memory that the library made; nothing is copied from there.
    """

    def __init__(self, desk: Desk, module: Any, take: Callable[[int, torch.Tensor], None]) -> None:
        """Take torch's module, and a function: what the server does with a gradient, `_keep` or `_update`."""
        super().__init__(desk)
        self._rpc, self._take, _held[:], self.rows = module, take, self.rows, _held

    def push(self) -> None:
        """See `Carrier.push`."""
        if self._desk.serves:
            self._desk.asked()
        else:
            self._rpc.rpc_sync(str(SERVER), self._take, args=(self._desk.row, self.x))
            self._desk.ask()

    def pull(self) -> None:
        """See `Carrier.pull`."""
        if self._desk.serves:
            self._desk.asked()
        else:
            self.x = self._rpc.rpc_sync(str(SERVER), _give, args=(self._desk.row,))
            self._desk.ask()


class ModeServer(Carrier):
    """One server that updates by SGD, and the workers' parameters and gradients in memory that it sees, or not.

    A push is over when its update is done.
    """

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self.rows, world = [], desk.world
        ranks = [rank for rank in range(world.size) if rank != SERVER]
        roles, module = Roles(tuple(ranks), (SERVER,)), nn.ParameterList([nn.Parameter(torch.zeros(desk.numel))])
        alone = world.subgroup([world.rank])
        assert alone is not None
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        self._sharding = ServedSharding(module, optimizer, alone, Options(bucket_mb=25.0), world, roles)
        self._boxes = world.mailbox("to servers"), world.mailbox("to workers")
        flats, self._buckets = self._sharding.flats, range(len(self._sharding.flats.buckets))
        self._step, self._pulled = 0, 0
        self._worker = ServedWorker(roles, flats, self._boxes, None, lambda: None)
        self._server = self._make_server(roles) if desk.serves else None
        self._check()

    def _make_server(self, roles: Roles) -> Server:
        groups, flats, update = self._sharding.groups, self._sharding.flats, self._sharding.update
        assert update is not None
        inbox = {w: OwnShares(groups, 0, [torch.float32]) for w in roles.workers if not flats.sees(w)}
        remembered, apart = Remembered(len(roles.workers), 0), dict.fromkeys(roles.workers, 0)
        clock = Clock(remembered.applied(), roles.workers, None)
        return Server(0, roles, flats, update, self._boxes, remembered, clock, Rules(None, False, 0.0), 0, apart, inbox)

    def push(self) -> None:
        """See `Carrier.push`."""
        self._step += 1
        if self._server is not None:
            while self._server.applied.completed < self._step:
                self._server.turn()
            self._desk.asked(self._desk.tell)
            return
        weight = 1.0 / self._desk.workers
        self._worker.portion = Portion(self._step, self._desk.row)
        for bucket in self._buckets:
            self._worker.push(bucket)
        self._worker.commit(Commit(self._step, self._desk.row, 1.0, weight, weight, 0.0, 0.0, 0.0, 0.0))
        self._desk.ask()
        self._desk.told()

    def pull(self) -> None:
        """See `Carrier.pull`."""
        if self._server is not None:
            while self._server.finals < self._desk.workers:
                self._server.turn()
            self._server.finals = 0
        else:
            self._worker.pull(0, final=True)
            self._worker.need(self._buckets)
            self._worker.look()

    def _check(self) -> None:
        """Raise CommunicationError unless the parameters are minus the mean of the gradients. Collective."""
        flats = self._sharding.flats
        for arena in flats.gradients:
            arena.tensor.fill_(float(self._desk.row + 1))
        self.push()
        self._desk.world.barrier()
        self.pull()
        mean = (self._desk.workers + 1) / 2
        good = self._desk.serves or torch.allclose(flats.parameters[0].tensor[: self._desk.numel], torch.tensor(-mean))
        error = None if good else CommunicationError("parallel.mode server: what is pulled is not what was pushed")
        self._desk.world.agree(error)

    def free(self) -> None:
        """See `Carrier.free`."""
        self._sharding.close()
        for box in self._boxes:
            box.free()


@contextmanager
def carriers(world: Communicator, numel: int, folder: Path) -> Iterator[dict[str, Carrier]]:
    """Every way there is, by its name in the report. Collective.

    Args:
        world: The ranks.
        numel: fp32 elements of a gradient.
        folder: An empty one that all ranks see.
    """
    with ExitStack() as stack:
        desk = Desk(world, numel)
        made: dict[str, Carrier] = {"memcpy": Memcpy(desk)}
        if world.num_nodes == 1:
            made["shared memory"] = SharedMemory(desk)
        made["letters"] = Letters(desk)
        module = stack.enter_context(rpc(world, folder))
        made["torch rpc"] = TorchRpc(desk, module, _keep)
        for name, carrier in made.items():
            _check(name, carrier, desk)
        made["torch rpc, and SGD"] = TorchRpc(desk, module, _update)
        made["parallel.mode server, and SGD"] = ModeServer(desk)
        yield made
        for carrier in made.values():
            carrier.free()
        desk.free()


def _check(name: str, carrier: Carrier, desk: Desk) -> None:
    """Raise CommunicationError unless what arrives is what was sent. Collective."""
    expected = torch.arange(desk.numel, dtype=torch.float32)
    carrier.x.copy_(expected + desk.row)
    carrier.push()
    good = all(row.equal(expected + number) for number, row in enumerate(carrier.rows) if desk.serves)
    carrier.x.zero_()
    desk.world.barrier()
    carrier.pull()
    good = good and (desk.serves or carrier.x.equal(expected + desk.row))
    error = None if good else CommunicationError(f"{name}: what arrives is not what was sent")
    desk.world.agree(error)


SIZES = (64 << 10, 1 << 20, 16 << 20)
QUICK_SIZES = (1 << 20,)
_ACTS = ("push", "pull")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    what = "Pushes to and pulls from a rank that serves, by each way of carrying them."
    made = BenchmarkParser(
        "server", what, "2", repeats=31, seconds=60.0, of="one size", quick=(5, 60.0), too_few="a server needs a worker"
    )
    made.add("sizes", type=byte_sizes, metavar="S,S", help="bytes that a worker moves [64Ki,1Mi,16Mi]")
    made.add("dir", type=Path, metavar="DIR", help="where ranks of torch rpc find each other [--out]")
    return run(made, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured at this rank count. Collective."""
    result: dict[str, Any] = {}
    for size in options.sizes or (QUICK_SIZES if options.quick else SIZES):
        with (
            temporary_folder(world, options.dir or options.out) as folder,
            carriers(world, size // 4, folder) as ways,
        ):
            calls = {f"{act} {name}": getattr(way, act) for name, way in ways.items() for act in _ACTS}
            times = summaries(timed(world, bytes_text(size), calls, options, begins=world.rank != SERVER))
            result[str(size)] = {way: {act: times[f"{act} {way}"] for act in _ACTS} for way in ways}
    return result


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Tables and the plot of the results by rank count."""
    tables, panels = [], []
    for ranks, result in results.items():
        for size, ways in result.items():
            rows = []
            for way, times in ways.items():
                ms, copies = ([of[act]["median"] * 1e3 for act in _ACTS] for of in (times, ways["memcpy"]))
                best = [times[act]["best"] * 1e3 for act in _ACTS]
                rows.append((way, *(cell for a, b in zip(ms, copies, strict=True) for cell in (a, a / b)), *best))
            columns = ("carried by", "push, ms", "/ memcpy", "pull, ms", "/ memcpy", "best push", "best pull")
            note = "Medians, and the best of all repetitions, which other work on the machine disturbs less."
            tables.append(ReportTable(f"{bytes_text(int(size))}, {ranks} ranks", columns, rows, note))
        largest = {name: milliseconds(times) for name, times in ways.items()}
        bars = {act: [ms[act] for ms in largest.values()] for act in _ACTS}
        title = f"{bytes_text(int(size))}, {ranks} ranks"
        panels.append(Panel(title, "milliseconds", bars, list(largest), log=True))
    return Report("Pushing to and pulling from a rank that serves", tables, panels=[panels])
