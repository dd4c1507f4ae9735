"""monitor.timeline = "A:B": what every rank computes and communicates in steps A to B, recorded.

    begin   where all ranks meet last before A: clocks are compared, hooks put in
    end     where they meet first after B: clocks are compared again, hooks taken out, every rank writes what it has
            recorded, and rank 0 makes one timeline of it

Where groups or workers take steps by themselves (parallel.mode local and server), the steps around A and B between two
meetings are recorded as well.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mpitrain.comm import Communicator, Work
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.config.run import timeline_steps
from mpitrain.config.settings import Config
from mpitrain.errors import CommunicationError, InputError
from mpitrain.monitor.timeline.merging import merge, told
from mpitrain.monitor.timeline.spans import Spans, recording_folder, write_rank
from mpitrain.trainer.folder import together
from mpitrain.trainer.recording.records import memory
from mpitrain.trainer.run import Callback, Run, Step

_Tell = Callable[[str, str, float, float], None]  # name, "forward" or "backward", begin, end
_HOOKS_MAY_COST = 0.01  # of what forward and backward take
_UNKNOWN = 0.05  # seconds of forward and backward, where no step was taken yet
_CALL_COST = 35e-6  # seconds that a call with its backward takes longer at most
_TRANSPARENT = (nn.ModuleList, nn.ModuleDict)  # they are not called themselves
# compute otherwise, in evaluation, where there are hooks
_OTHERWISE = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _Call:
    """A call of a module, in the call of the module around it."""

    __slots__ = ("begin", "name", "parent")

    def __init__(self, name: str, parent: _Call | None, begin: float) -> None:
        self.name, self.parent, self.begin = name, parent, begin

    def inside(self, other: _Call) -> bool:
        """Return whether this call is in the other one."""
        at = self.parent
        while at is not None and at is not other:
            at = at.parent
        return at is not None


class ModuleHooks:
    """Hooks on some modules, which tell when these compute, forward and backward.

    Forward is what lies between the hooks before and after a module's call. Backward of that call begins when the
    gradient of its output is there, and ends when that of its input is, or when that of another call's output is,
    whatever comes first: hooks on these tensors look on, and neither the graph nor what is computed changes. (A full
    backward hook of the module would put functions of its own into the graph, after which tensors cannot be changed in
    place.)

    Args:
        modules: Their names, and they.
        tell: Is told of each call and each backward pass.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], tell: _Tell) -> None:
        self._tell, self._on = tell, True
        self._forward: list[_Call] = []  # calls under way
        self._backward: list[tuple[_Call, float]] = []  # whose backward is under way, and since when
        self._handles: list[Any] = []
        self._compiled: list[tuple[nn.Module, Any]] = []
        for name, module in modules:
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is not None:  # hooks would be compiled with it
                self._compiled.append((module, compiled))
                module._compiled_call_impl = partial(self._around, name, compiled)
                continue
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name), prepend=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Take all hooks away."""
        self._on = False
        for handle in self._handles:
            handle.remove()
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled
        self._handles, self._compiled = [], []

    def end_of_backward(self, end: float) -> None:
        """A backward pass is over, and so is that of all modules."""
        self._end_down_to(0, end)

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        call = _Call(name, self._forward[-1] if self._forward else None, time.perf_counter())
        self._forward.append(call)
        if torch.is_grad_enabled():
            x = _first_tensor(args)
            if x is not None and x.requires_grad and not self._tells(x, call):
                x.register_hook(partial(self._input_ready, call))
                x._watched = (self, call, False)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._forward:
            return
        call = self._forward.pop()
        self._tell(call.name, "forward", call.begin, time.perf_counter())
        if torch.is_grad_enabled():
            y = _first_tensor((output,))
            if y is not None and y.grad_fn is not None:
                y.register_hook(partial(self._output_ready, call))
                y._watched = (self, call, True)

    def _tells(self, x: Any, call: _Call) -> bool:
        """Return whether a hook is there that ends this call's backward when the gradient of its input comes.

        It is that of the call whose output the input is, or of a call around this one with the same input. A hook more
        takes microseconds, which adds up over all modules.
        """
        by, other, output = getattr(x, "_watched", (None, call, False))
        return by is self and (output or call.inside(other))

    def _around(self, name: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a compiled module."""
        self._before(name, _NONE, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            self._after(_NONE, args, output)
        return output

    def _output_ready(self, call: _Call, gradient: torch.Tensor) -> None:
        """Backward of a call begins."""
        if not self._on:
            return
        now, under_way = time.perf_counter(), self._backward
        kept = len(under_way)
        while kept and not (call.inside(under_way[kept - 1][0]) or under_way[kept - 1][0].inside(call)):
            kept -= 1
        self._end_down_to(kept, now)
        begin = now
        while kept and under_way[kept - 1][0].inside(call):  # its last module has the same output, and told it first
            kept -= 1
            begin = under_way[kept][1]
        under_way.insert(kept, (call, begin))

    def _input_ready(self, call: _Call, gradient: torch.Tensor) -> None:
        """Backward of a call is over."""
        for number, (other, _) in enumerate(self._backward):
            if other is call:
                self._end_down_to(number, time.perf_counter())
                return

    def _end_down_to(self, kept: int, end: float) -> None:
        while len(self._backward) > kept:
            call, begin = self._backward.pop()
            if self._on:
                self._tell(call.name, "backward", begin, end)


_NONE = nn.Module()


def _first_tensor(values: tuple[Any, ...]) -> Any:
    """Return the first tensor in what a module takes or gives; None where there is none."""
    if values and isinstance(values[0], torch.Tensor):
        return values[0]
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)), None)


def levels_of(module: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The modules of a model by how deep they lie in it, the outermost first.

    A module that is a part of a compiled one is left out, and so is one that computes otherwise where there are hooks.
    """
    levels: list[list[tuple[str, nn.Module]]] = []
    seen: set[nn.Module] = set()

    def visit(name: str, at: nn.Module, depth: int) -> None:
        for key, child in at.named_children():
            if isinstance(child, _OTHERWISE) or child in seen:
                continue
            seen.add(child)
            full = f"{name}.{key}" if name else key
            if isinstance(child, _TRANSPARENT):
                visit(full, child, depth)
                continue
            if len(levels) == depth:
                levels.append([])
            levels[depth].append((full, child))
            if getattr(child, "_compiled_call_impl", None) is None:
                visit(full, child, depth + 1)

    visit("", module, 0)
    return levels


def affordable(levels: Sequence[Sequence[object]], calls: int, seconds: float) -> int:
    """Return how many levels can be watched for so many seconds a step; at least the first one.

    Args:
        levels: As of `levels_of`.
        calls: Of each module in a step.
        seconds: What the hooks may cost in a step.
    """
    within = sum(modules * calls * _CALL_COST <= seconds for modules in accumulate(map(len, levels)))
    return min(len(levels), max(1, within))


class Recording:
    """One rank's recording while it goes on. Collective to make, and to end.

    Args:
        trainer: What is recorded.
        clock: Turns `time.perf_counter()` into this rank's time.
        step_seconds: Of forward and backward in the step before.
    """

    def __init__(self, trainer: Run, clock: Callable[[float], float], step_seconds: float) -> None:
        self._trainer, self._clock = trainer, clock
        world, engine = trainer.world, trainer.engine
        self.token = world.broadcast_object(f"{time.time_ns()}")
        self.spans = Spans()
        levels = levels_of(engine.module)
        microbatch = trainer.config.train.microbatch or trainer.samples
        calls = max(1, -(-trainer.samples // (trainer.mesh.readers.size * microbatch)))
        self.depth = min(world.all_gather_object(affordable(levels, calls, _HOOKS_MAY_COST * step_seconds)))
        self._offsets = [self.offset()]
        self._hooks = ModuleHooks([named for level in levels[: self.depth] for named in level], self.spans.module)
        self.spans.after_backward = self._hooks.end_of_backward
        self._unix, self._memory = time.time(), [self._held()]
        engine.clock.leave_out()  # the above is no part of any step
        engine.clock.steps, engine.clock.listener = [], self.spans
        world.journal.record(True)

    def offset(self) -> list[float]:
        """Compare clocks; return this rank's time, what is to be added, and how far off that may be. Collective."""
        return list(offset_of(self._trainer.world, lambda: self._clock(time.perf_counter())))

    def _held(self) -> tuple[float, dict[str, int]]:
        return time.perf_counter(), memory(self._trainer)

    def stop(self) -> dict[str, Any]:
        """Record no longer; returns what was recorded. Not collective."""
        trainer, clock = self._trainer, self._trainer.engine.clock
        end, totals = time.perf_counter(), clock.totals()
        clock.settle(wait=True)
        steps, clock.steps, clock.listener = clock.steps or [], None, None
        self._hooks.remove()
        operations = trainer.world.journal.take()
        trainer.world.journal.record(False)
        self._memory.append(self._held())
        at = self._clock
        rows = []
        ends = [*steps[1:], (0, end, totals)] if steps else []  # a rank that only serves takes no steps
        for (number, begin, before), (_, until, after) in zip(steps, ends, strict=True):
            rows.append([number, at(begin), at(until), {part: after[part] - before[part] for part in before}])
        return {
            "token": self.token,
            "rank": trainer.world.rank,
            "world_size": trainer.world.size,
            "role": trainer.strategy.role(trainer.world.rank),
            "host": socket.gethostname(),
            "node": trainer.world.node,
            "device": str(trainer.device) if is_accelerator(trainer.device) else "cpu",
            "unix": self._unix,
            "depth": self.depth,
            "left_out": self.spans.left_out,
            "steps": rows,
            "spans": [[kind, name, at(b), at(e), more] for kind, name, b, e, more in self.spans.all()],
            "communication": [[*one[:5], at(one.begin), at(one.end), *one[7:]] for one in operations],
            "waited": self.spans.waited,
            "memory": [[at(when), figures] for when, figures in self._memory],
            "offsets": self._offsets,
        }


class TimelineRecorder(Callback):
    """Records the steps that monitor.timeline names, once.

    Args:
        config: The settings.
        clock: Turns `time.perf_counter()` into this rank's time: for tests of ranks whose clocks differ.
    """

    def __init__(self, config: Config, clock: Callable[[float], float] = lambda at: at) -> None:
        self._wanted = timeline_steps(config.monitor.timeline)
        self._clock = clock
        self._recording: Recording | None = None
        self._done = not config.monitor.timeline
        self._before = 0.0  # seconds of forward and backward until the last meeting
        self._step_seconds = _UNKNOWN

    def on_fit_start(self, trainer: Run) -> None:
        self._recording = None
        if not self._done:
            self._consider(trainer)

    def on_step_done(self, trainer: Run, step: Step) -> None:
        if self._done or not step.together:
            return
        if self._recording is None:
            self._consider(trainer)
        elif trainer.step >= self._wanted[1] or trainer.last_step:
            self._end(trainer, self._recording)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        """Write what was recorded so far, which may explain the error."""
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                write_rank(recording_folder(trainer.folder.path, self._wanted), recording.stop())
            except InputError as second:
                trainer.folder.log.info("%s", second)

    def _consider(self, trainer: Run) -> None:
        """Begin to record, if a step that is wanted comes before all ranks meet again."""
        first, last = self._wanted
        if trainer.step >= last or trainer.last_step:
            self._done = True
        elif trainer.strategy.next_meeting(trainer) >= first:
            self._recording = Recording(trainer, self._clock, self._step_seconds)
        elif trainer.step >= first - 2:  # the last step before those that are recorded says what hooks may cost
            totals = trainer.engine.clock.totals()
            now = totals["forward"] + totals["backward"]
            if self._before:
                self._step_seconds = now - self._before
            self._before = now

    def _end(self, trainer: Run, recording: Recording) -> None:
        """Write what was recorded, and have rank 0 make one timeline of it. Collective."""
        self._recording, self._done = None, True
        recorded = recording.stop()
        recorded["offsets"].append(recording.offset())
        folder = recording_folder(trainer.folder.path, self._wanted)
        together(trainer.world, lambda: write_rank(folder, recorded))
        if trainer.world.rank == 0:
            try:
                lines = told(merge(folder))
            except InputError as error:
                lines = [f"timeline: {error}"]
            for line in lines:
                trainer.say(line)
        trainer.world.barrier()  # here, and not in the next step, which would count what rank 0 has drawn as a wait
        trainer.engine.clock.leave_out()


# -- Offsets between the clocks of the ranks, measured by messages
#
# A rank is asked for its time again and again. Of the question that was answered soonest the time must have been
# taken between its begin and its end; half of that bounds the error. On each node the first rank asks the others of
# the node, the nodes beside one another; then rank 0 asks the first rank of each node. Ranks whose turn it is not
# sleep meanwhile: where there are more ranks than cores they would take the time that the answers need.
#
# Reference:
#     Cristian 1989, Probabilistic clock synchronization.

Clock = Callable[[], float]
_QUESTIONS = 60  # at least, to each rank, and ...
_MOST = 6000  # ... at most, as long as ...
_GOOD = 80e-6  # ... no answer came within so many seconds
_LONGEST = 2.0  # seconds for one rank at most
_SPIN = 3e-4  # seconds that an answer is waited for without a pause
_BURST = 10  # questions, before which the rank that asks sleeps: who has slept is let run at once, for a while
_PAUSE = 1e-3  # seconds between two looks of a rank whose turn it is not
_ASK, _TOLD, _TURN = 71, 72, 73  # tags


class Offset(NamedTuple):
    """The difference between rank 0's time and a rank's.

    Attributes:
        at: The rank's time at which that holds, in seconds.
        seconds: What is to be added.
        within: How far off that may be, in seconds.
    """

    at: float
    seconds: float
    within: float


def offset_of(world: Communicator, clock: Clock) -> Offset:
    """This rank's offset from rank 0. Collective.

    Args:
        world: All ranks.
        clock: This rank's.
    """
    firsts = sorted(world.nodes.index(node) for node in set(world.nodes))
    mine = [rank for rank, node in enumerate(world.nodes) if node == world.node]
    if world.rank not in firsts:
        own, told = _answer(world, mine[0], clock), torch.empty(2, dtype=torch.float64)
        _sleep_until(world, world.irecv(told, mine[0], _TOLD))
        seconds, within = told.tolist()
        return Offset(own.at, own.seconds + seconds, own.within + within)
    own = Offset(clock(), 0.0, 0.0)
    for rank in mine[1:]:
        _ask(world, rank, clock)
    if world.rank:
        own = _answer(world, 0, clock)
    for rank in firsts[1:] if world.rank == 0 else ():
        _ask(world, rank, clock)
    for rank in mine[1:]:  # to whose offset that of their first rank is added
        world.send(torch.tensor([own.seconds, own.within], dtype=torch.float64), rank, _TOLD)
    return own


def _ask(world: Communicator, rank: int, clock: Clock) -> None:
    """Ask a rank for its time until it is known well, and tell it its offset."""
    question, answer = torch.zeros(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    best, at, seconds = float("inf"), 0.0, 0.0
    began = time.perf_counter()
    for number in range(_MOST):
        enough = best < _GOOD or time.perf_counter() - began > _LONGEST
        last = (number >= _QUESTIONS and enough) or number == _MOST - 1
        question[0] = 1.0 if last else 0.0
        if number % _BURST == 0:
            time.sleep(_PAUSE)
        coming = world.irecv(answer, rank, _ASK)
        begin = clock()
        sent = world.isend(question, rank, _ASK)
        _wait(world, coming)
        end = clock()
        _wait(world, sent)
        if end - begin < best:
            best, at = end - begin, float(answer[0])
            seconds = (begin + end) / 2 - at
        if last:
            break
    world.send(torch.tensor([at, seconds, best / 2], dtype=torch.float64), rank, _TURN)


def _answer(world: Communicator, asker: int, clock: Clock) -> Offset:
    """Answer a rank's questions; returns the offset from it that it has found."""
    question, answer = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    wait: Callable[[Communicator, Work], None] = _sleep_until  # for the first question
    while True:
        wait(world, world.irecv(question, asker, _ASK))
        wait = _wait
        answer[0] = clock()
        _wait(world, world.isend(answer, asker, _ASK))
        if question[0]:
            break
    told = torch.empty(3, dtype=torch.float64)
    world.recv(told, asker, _TURN)
    return Offset(*told.tolist())


def _wait(world: Communicator, work: Work, *, spin: float = _SPIN, pause: float = _SPIN / 3) -> None:
    """Wait, at first without a pause; then with pauses, as the other rank may need this core."""
    began = time.monotonic()
    while not work.done():
        waited = time.monotonic() - began
        if waited > world.process.watchdog.timeout:
            raise CommunicationError("another rank did not answer when clocks were compared; is it still there?")
        if waited > spin:
            time.sleep(pause)


def _sleep_until(world: Communicator, work: Work) -> None:
    """Wait without taking time from others."""
    _wait(world, work, spin=0.0, pause=_PAUSE)
