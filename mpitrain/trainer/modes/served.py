"""parallel.mode server: workers take steps independently, and servers have parameters and optimizer states.

    a worker    claim a part of a step's batch -> pull -> forward, backward and push, bucket by bucket -> commit
    a server    apply pushed gradients, send pulled parameters; in a separate thread on a rank that is also a worker
    all         synchronize before the run is evaluated, saved or ended, when all gradients are applied

The results of a step are known when all its parts are applied. The server that assigns samples sends them to all ranks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.data import Batch
from mpitrain.data.on_device import on_device, pin
from mpitrain.errors import refusal
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import Mesh
from mpitrain.layout.ownership import Division
from mpitrain.loose.clock import Clock, Commit, History, LetterKind, Portion, StepRecord
from mpitrain.loose.server import ServedWorker, Server
from mpitrain.loose.sharding import Roles, ServedSharding, ServerShares, squares
from mpitrain.shard.ddp import broadcast_state, broadcast_tensors
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.data import GroupPlaces, augmentation
from mpitrain.trainer.elastic import Survivors, TooFewRanks
from mpitrain.trainer.engine import Engine, StepResult
from mpitrain.trainer.memory import MemoryAccount
from mpitrain.trainer.options import every_setting
from mpitrain.trainer.run import Restored, Run, Step, Strategy
from mpitrain.trainer.saving import SaveSchedule

_UNSUPPORTED = {  # settings that must have their default in this mode
    *("parallel.pipeline", "parallel.tensor", "parallel.zero", "parallel.offload", "parallel.offload_parameters"),
    *("run.reproducible", "comm.compression", "comm.parameter_compression", "comm.rings", "model.compile"),
}
_PATIENCE = 10.0  # seconds to wait for the end of a server's thread


class ServedEngine(Engine):
    """A module and its loss on a worker, and shares of its optimizer on a server. Collective over `world` to make.

    Args:
        *args: Arguments of `Engine`; its `comm` contains only this rank.
        world: All ranks.
        roles: Roles of the ranks: workers and servers.
        bulk: If true, the servers compute the norm of a whole batch's gradients and clip them.
        **kwargs: Keyword arguments of `Engine`.
    """

    sharding: ServedSharding
    inbox: Mapping[int, ServerShares]  # on a server: buffers for gradients of workers that share no memory with it

    def __init__(self, *args: Any, world: Communicator, roles: Roles, bulk: bool, **kwargs: Any) -> None:
        self._world, self._roles, self._bulk, self.inbox = world, roles, bulk, {}
        broadcast_state(args[0], world)
        super().__init__(*args, **kwargs)
        self._axes, self._updating = [world], len(roles.servers)

    def _place(self, division: Division) -> ServedSharding:
        return ServedSharding(self.module, self.optimizer, self.comm, self.config, self._world, self._roles)

    def memory(self) -> MemoryAccount:
        """Return the bytes by category, including a server's shares of parameters and gradients."""
        account, sharding, servers = super().memory(), self.sharding, len(self._roles.servers)
        if sharding.published is None or sharding.sums is None:
            return replace(account, expected=account.expected | {"states": 0})
        published, sums = sharding.published.nbytes(), sharding.sums.nbytes()
        expected = {
            "parameters": account.expected["parameters"] + published,
            "gradients": account.expected["gradients"] + sums,
            "states": account.expected["states"] // servers,
        }
        buffers = account.buffers + sum(shares.nbytes() for shares in self.inbox.values())
        return replace(account, gradients=account.gradients + sums, buffers=buffers, expected=expected)

    @torch.no_grad()
    def take_over(self, earlier: ServedEngine) -> None:
        """Copy shares, optimizer states and the module's buffers from an earlier engine with the same servers."""
        pieces = earlier.sharding.flat_parameters
        numbers = iter([number for number, piece in enumerate(pieces) for _ in piece.contents])
        for flat_parameter in list(self.sharding.flat_parameters):  # the earlier engine's may have been divided
            self.sharding.divide(flat_parameter, [next(numbers) for _ in flat_parameter.contents])
        for flat_parameter, before in zip(self.sharding.flat_parameters, pieces, strict=True):
            flat_parameter.value.copy_(before.value)
            flat_parameter.store()
            if before.value in earlier.optimizer.state:
                self.optimizer.state[flat_parameter.value] = earlier.optimizer.state[before.value]
        for buffer, before_it in zip(self.module.buffers(), earlier.module.buffers(), strict=True):
            buffer.copy_(before_it)

    def step(self, lr: float | None = None) -> StepResult:
        """Return the gradient norm of this worker's mean loss; the servers update the parameters.

        The norm is 0 if the servers compute the gradient norm of the whole batch.
        """
        if self._bulk:
            return StepResult(0.0, False)
        squared_norm = squares(self.sharding.gradients.flat)
        norm = math.sqrt(squared_norm) if math.isfinite(squared_norm) else math.nan
        return StepResult(norm, not math.isfinite(norm))

    def take_unused(self) -> torch.Tensor:
        """Return which parameters no backward pass used since the last call: uint8, in the order of the layout."""
        unused = self.sharding.reducer.take_unused(self.comm)
        every = [p for group in self.sharding.groups for p in group.parameters]
        return torch.tensor([p in unused for p in every], dtype=torch.uint8)


class Served(Strategy):
    """Training with parameter servers.

    Attributes:
        roles: Roles of the ranks: workers and servers.
        session: Session of the current training; None before it begins.
        history: State of the steps before workers died, from which training continues; None if it continues from a
            checkpoint or begins at step 0.
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.session: Session | None = None
        self.history: History | None = None
        refuse_unsupported_settings(config, world.size)
        self.roles = Roles.of(world.size, config.parallel.servers)

    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        self.roles = Roles.of(world.size, config.parallel.servers)
        alone = world.subgroup([world.rank], label="alone")
        assert alone is not None
        mesh = Mesh.make(alone)
        self.engine = partial(ServedEngine, world=world, roles=self.roles, bulk=config.parallel.staleness == 0)
        count = len(self.roles.workers)
        evaluating = VirtualWorkers(world.rank, count, count, idle=world.rank not in self.roles.workers)
        return GroupPlaces(mesh, VirtualWorkers(0, 1, 1), world, evaluating)

    def describe(self) -> str:
        staleness, servers = self.config.parallel.staleness, self.config.parallel.servers
        pace = {"none": "asynchronous", 0: "bulk-synchronous"}.get(staleness, f"at most {staleness} steps apart")
        who = f"{servers} of the ranks only serve" if servers else "every rank serves a share"
        return f"parameter server, {pace}; {who}"

    def steps(self, trainer: Run) -> Iterator[Step]:
        history, self.history = self.history, None
        if history is None:
            history = History(len(self.roles.workers), trainer.step)
        self.session = Session(trainer, self.roles, history)
        with self.session.open():
            while True:
                yield from self.session.until(self.next_meeting(trainer))

    def next_meeting(self, trainer: Run) -> int:
        step, train = trainer.step, trainer.config.train
        evaluated = train.evaluate_every * (step // train.evaluate_every + 1) if train.evaluate_every else None
        saved = next(one for one in trainer.callbacks if isinstance(one, SaveSchedule)).next_after(step)
        return min(meeting for meeting in (train.steps, evaluated, saved) if meeting is not None)

    def role(self, rank: int) -> str:
        return "worker" if rank in self.roles.workers else "server"

    def survivors(self, trainer: Run) -> Survivors:
        return ServedSurvivors(trainer, self)


def refuse_unsupported_settings(config: Config, ranks: int) -> None:
    """Raise InputError for settings that parameter servers do not support.

    Args:
        config: The settings.
        ranks: Number of all ranks.
    """
    parallel = config.parallel
    if parallel.servers >= ranks:
        raise refusal(
            f"parallel.servers {parallel.servers} leaves no worker among {ranks} ranks; set it to at most "
            f"{ranks - 1}, or to 0, so that every rank is both server and worker"
        )
    if config.elastic.mode == "shrink" and not parallel.servers:
        raise refusal(
            "elastic.mode shrink: with parallel.servers 0 every rank serves a share of the parameters, which "
            "is lost if the rank fails; set parallel.servers to 1 or more"
        )
    for key, field, value in every_setting(config):
        if key in _UNSUPPORTED and value not in (field.default, 0):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise refusal(
                f"{key} {shown} cannot be combined with parallel.mode server, in which workers have the whole "
                f"model and servers the optimizer; remove {key}, or use parallel.mode sync"
            )
    if config.optim.schedule_options.get("cycle_momentum"):
        raise refusal(
            "optim.schedule_options: cycle_momentum cannot be combined with parallel.mode server, whose "
            "workers send servers only the learning rate; remove it, or use parallel.mode sync"
        )
    if config.train.precision == "fp16":
        raise refusal(
            "train.precision fp16 cannot be combined with parallel.mode server, because its loss scale needs "
            "all gradients of a step at once; use bf16 or fp32"
        )
    sizes = config.train.batch_sizes
    least = min(sizes.after(0))
    if least < ranks - parallel.servers:
        raise refusal(
            f"{sizes.key(least)} {least} has fewer samples than there are workers "
            f"({ranks - parallel.servers}); raise it, or start fewer ranks"
        )


class Session:
    """Work of a rank from the beginning of training to its end.

    Args:
        trainer: Trainer of the run.
        roles: Roles of the ranks: workers and servers.
        history: State of the steps applied before.

    Attributes:
        engine: Engine of this rank.
    """

    def __init__(self, trainer: Run, roles: Roles, history: History) -> None:
        self._trainer, self._roles, self._staleness = trainer, roles, trainer.config.parallel.staleness
        world, self._sizes, self._parts = trainer.world, trainer.batch_sizes, history.parts
        self._origin = trainer.position - self._sizes.before(trainer.step)  # position of the run's first step
        self._order = trainer.data.order(trainer.config.run.seed)
        assert isinstance(trainer.engine, ServedEngine)
        self.engine, self._sharding = trainer.engine, trainer.engine.sharding
        self._boxes = world.mailbox("to servers"), world.mailbox("to workers")
        self._error: BaseException | None = None
        self._server = self._make_server(world, history) if world.rank in roles.servers else None
        self._worker = ServedWorker(roles, self._sharding.flats, self._boxes, self._staleness == 0, self._raise_failure)
        if world.rank in roles.workers:
            parameters, worker = self._sharding.parameters, self._worker
            parameters.wait_for, worker.on_arrival = worker.wait_for, parameters.copy_to_device
            self._sharding.gradients.push = worker.push

    def _make_server(self, world: Communicator, history: History) -> Server:
        roles, flats, sharding = self._roles, self._sharding.flats, self._sharding
        share, update = sharding.share, sharding.update
        assert share is not None and update is not None
        kinds = [g.dtype for g in sharding.groups]
        inbox = {w: ServerShares(sharding.groups, share, kinds) for w in roles.workers if not flats.can_access(w)}
        self.engine.inbox = inbox
        staleness = None if self._staleness == "none" else self._staleness
        clock = Clock(history.applied(), roles.workers, staleness) if world.rank == roles.servers[0] else None
        # bytes between nodes for one part: gradients to servers on other nodes, and parameters from them
        moved = 2 * sum(g.layout.numel // g.layout.parts * g.dtype.itemsize for g in sharding.groups)
        nodes, trainer = world.nodes, self._trainer
        remote_bytes = {w: moved * sum(nodes[server] != nodes[w] for server in roles.servers) for w in roles.workers}
        config, step = trainer.config, trainer.step
        return Server(share, roles, flats, update, self._boxes, history, clock, config, step, remote_bytes, inbox)

    @property
    def history(self) -> History | None:
        """State of the applied steps, on the server that assigns samples; None on other ranks."""
        gives_out = self._trainer.world.rank == self._roles.servers[0]
        return self._server.history if self._server is not None and gives_out else None

    @property
    def known(self) -> int:
        """Last step that this rank knows to be complete."""
        return self._sizes.steps(self._trainer.position - self._origin)

    def position(self, step: int) -> int:
        """Return the position, in the order of samples, of the first sample after a step."""
        return self._origin + self._sizes.before(step)

    def _bounds(self, portion: Portion) -> tuple[int, int]:
        """Return the range [first, last) of a portion's samples within the batch of its step."""
        bounds = split(self._sizes.size(portion.step - 1), self._parts)
        return bounds[portion.part], bounds[portion.part + 1]

    # -- beginning and end

    @contextmanager
    def open(self) -> Iterator[None]:
        """Run the server in a thread during the block, if this rank is both server and worker."""
        thread = None
        if self._server is not None and self._trainer.world.rank in self._roles.workers:
            thread = threading.Thread(target=self._serve_beside, name="parameter-server", daemon=True)
            thread.start()
        try:
            yield
        finally:  # not collective: this rank may have failed
            if thread is not None:
                self._boxes[0].post(self._trainer.world.rank, [LetterKind.END])
                thread.join(_PATIENCE)

    def _serve_beside(self) -> None:
        assert self._server is not None
        try:
            self._server.serve()
        except BaseException as error:  # the training thread raises it again
            self._error = error
            self._boxes[1].post(self._trainer.world.rank, [LetterKind.FAILED])

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    # -- from one synchronization to the next

    def until(self, limit: int) -> Iterator[Step]:
        """Take and yield steps up to step `limit`, or fewer if there is a reason to stop.

        All ranks synchronize at the end.
        """
        first, world = self._trainer.step, self._trainer.world
        if world.rank in self._roles.workers:
            yield from self._work(limit)
            last = self._worker.portion.step
        else:
            assert self._server is not None
            with self.engine.clock.optimizer:
                self._server.serve(limit)
            last = self._server.applied.completed
        self._worker.meet(works=world.rank in self._roles.workers)
        # each worker has buffers, such as batch statistics, of its own samples: evaluate those that are saved
        broadcast_tensors(self.engine.module.buffers(), world, self._roles.workers[0])
        for number in range(max(first, self._trainer.step) + 1, last + 1):
            yield self._step(self._worker.next_record(), is_last=number == last)

    def _work(self, limit: int) -> Iterator[Step]:
        """Work on the portions assigned to this rank, and yield steps as they become known, except the last one."""
        trainer, worker = self._trainer, self._worker
        done = trainer.step
        while True:
            portion = worker.claim(limit, stop=bool(trainer.stop_reason))
            while worker.records and (portion is not None or worker.records[0].step < worker.portion.step):
                step = self._step(worker.records.popleft(), is_last=False)
                done = step.number
                yield step
            if portion is None:
                break
            self._compute(portion)
        worker.pull(worker.portion.step, final=True)
        worker.wait_for(range(len(self._sharding.flats.buckets)))
        trainer.step = done

    def _compute(self, portion: Portion) -> None:
        trainer, worker = self._trainer, self._worker
        clock = self.engine.clock
        clock.step(portion.step)
        worker.pull(0 if self._staleness == "none" else portion.step - 1 - self._staleness)
        with clock.data:
            batch = self._read(portion)
        trainer.step, trainer.samples = portion.step - 1, self._sizes.size(portion.step - 1)
        trainer.places = replace(trainer.places, first_worker=portion.part)
        step = trainer.train_step(batch)
        worker.wait_for(range(len(self._sharding.flats.buckets)))  # a part without samples has not used them
        lo, hi = self._bounds(portion)
        weight = (hi - lo) / trainer.samples
        norm = step.norm / weight if weight else 0.0
        factor = 0.0 if step.skipped else 1.0
        clip = trainer.config.train.clip
        if factor and self._staleness != 0 and clip and norm > clip:
            factor = clip / (norm + 1e-6)
        commit = Commit(portion.step, portion.part, step.lr, weight, factor, step.loss, norm, 0.0, 0.0)
        worker.commit(commit, self.engine.take_unused())

    def _read(self, portion: Portion) -> Batch:
        """Return the samples of a portion."""
        trainer = self._trainer
        lo, hi = self._bounds(portion)
        begin = self.position(portion.step - 1)
        ids = self._order.ids(begin + lo, hi - lo)
        x, y = map(torch.from_numpy, trainer.data.read_at(ids, np.arange(begin + lo, begin + hi)))
        batch = augmentation(trainer.config, trainer.data)(Batch(ids, x, y, begin, lo))
        return next(on_device(iter([pin(batch, to=trainer.device)]), trainer.device))

    def _step(self, record: StepRecord, *, is_last: bool) -> Step:
        """Return a step in the form that the trainer uses."""
        trainer, number = self._trainer, int(record.step)
        size, begin = self._sizes.size(number - 1), self.position(number - 1)
        ids = self._order.ids(begin, size if trainer.config.data.record_ids else 0)
        batch = Batch(ids, torch.empty(0), torch.empty(0), begin)  # without samples: other workers have most of them
        lr, skipped = trainer.schedule.rate(number - 1), bool(record.skipped)
        step = Step(number, batch, record.loss, lr, record.norm, skipped, seconds=record.seconds, together=is_last)
        if len(ids):
            step.extras["ids"] = ids.tolist()
        if self._staleness != 0:
            step.extras["staleness_mean"] = record.staleness_mean
            step.extras["staleness_max"] = record.staleness_max
            step.extras["ahead_max"] = int(record.ahead_max)
        step.extras["between_nodes_bytes"] = int(record.between_nodes)
        return step


class ServedSurvivors(Survivors):
    """Callback that keeps the state of a run with servers when workers die. The servers have the whole state.

    No copies are made. The remaining ranks form a smaller world with the same servers, and the new engine takes over
    their shares, optimizer states and the record of applied steps. The parts of a dead worker are assigned to other
    workers. Gradients that it was pushing may have been applied by some servers and not by others. If a server dies,
    its shares are lost; the job ends, and must be restarted from the last checkpoint.

    Args:
        trainer: Trainer of the run.
        strategy: Strategy of the run.
    """

    def __init__(self, trainer: Run, strategy: Served) -> None:
        super().__init__(trainer)
        self._strategy = strategy
        # from before ranks died: the engine with its memory, the applied steps, the last step that all ranks know
        self._left: tuple[ServedEngine, History, Restored] | None = None
        self._servers = set(strategy.roles.servers)  # numbers in the first world
        self._completed = 0  # steps that were complete when ranks died

    def copy(self, trainer: Run) -> None:
        """Do nothing, because the servers have the state."""

    def on_update(self, trainer: Run, step: Step) -> None:
        """Do nothing, because the servers have the state."""

    def on_fit_start(self, trainer: Run) -> None:
        super().on_fit_start(trainer)
        self._step = max(self._step, self._completed)

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if step.number > self._completed:  # earlier steps are only repeated for ranks that did not know them
            super().on_step_end(trainer, step)

    def rebuild_world(self) -> None:
        self._shrink_world(None)  # keeps the order, in which the servers are last
        dead = sorted(self._servers & set(self._lost))
        if dead:
            which = f"rank {dead[0]}, a server," if len(dead) == 1 else f"ranks {', '.join(map(str, dead))}, servers,"
            raise TooFewRanks(
                f"{which} failed, and a part of the parameters is lost; start the job again to continue from "
                "the last checkpoint",
                agreed=True,
            )
        if self.everyone.size == len(self._servers):
            raise TooFewRanks(
                "all workers failed; start the job again to continue from the last checkpoint", agreed=True
            )
        self._copy_last_state()
        self._trainer.let_go()
        self._reset_settings()
        self._trainer.world = self.everyone
        self._trainer.folder.move_to(self.everyone)

    def _copy_last_state(self) -> None:
        trainer, session = self._trainer, self._strategy.session
        if session is None:
            return
        own_history = session.history  # None except on the server that assigns samples
        old_rank = trainer.world.rank
        reports = self.everyone.all_gather_object(
            [old_rank, session.known, own_history.to_json() if own_history is not None else None]
        )
        history = History.from_json(next(encoded for _, _, encoded in reports if encoded is not None))
        # servers learn the step when all synchronize
        step = min(int(known) for _, known, _ in reports[: -len(self._servers)])
        if reports[0][0] != 0 and history.records:  # rank 0 died, and its last record is unknown
            step = int(history.records[0].step) - 1
        values = trainer.state() | {"position": session.position(step)}
        self._left, self._completed = (session.engine, history, Restored(step, values)), history.completed

    def restore(self, trainer: Run) -> Restored | None:
        self._store = trainer.store
        if self._left is None:
            return None
        assert isinstance(trainer.engine, ServedEngine)
        earlier, self._strategy.history, restored = self._left
        trainer.engine.take_over(earlier)
        self._left = None
        return restored
