"""parallel.mode server itself, as a way of carrying: what workers and servers do in a step, without the model."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.servers.carriers import SERVER, Carrier, Desk
from mpitrain.errors import CommunicationError
from mpitrain.loose.clock import Clock, Portion
from mpitrain.loose.letters import Commit, Remembered, Rules
from mpitrain.loose.memory import OwnShares, Roles
from mpitrain.loose.server import Server
from mpitrain.loose.sharding import ServedSharding
from mpitrain.loose.worker import ServedWorker
from mpitrain.shard.sharding import Options


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
