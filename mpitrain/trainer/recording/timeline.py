"""Timeline of all computation and communication of each rank in steps A to B (monitor.timeline = "A:B").

    begin   at the last synchronization of all ranks before A: clocks are compared, hooks installed
    end     at the first synchronization after B: clocks are compared again, hooks removed, every rank writes its
            recording, and rank 0 merges them into one timeline

If groups or workers take steps independently (parallel.mode local and server), the steps around A and B between two
synchronizations are recorded as well.
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
from mpitrain.data.folders import agree_on_errors
from mpitrain.errors import CommunicationError, InputError
from mpitrain.monitor.timeline.merging import describe, merge
from mpitrain.monitor.timeline.spans import Spans, recording_folder, write_rank
from mpitrain.trainer.recording.step_memory import StepMemory
from mpitrain.trainer.run import Callback, Run, Step

_Report = Callable[[str, str, float, float], None]  # name, "forward" or "backward", begin, end
_HOOKS_MAY_COST = 0.01  # largest share of the time of forward and backward
_UNKNOWN = 0.05  # seconds of forward and backward to assume before the first step
_CALL_COST = 35e-6  # upper bound of the seconds that hooks add to a call and its backward
_TENSOR_COST = 10e-6  # upper bound of the seconds that recording a tensor adds, from when autograd keeps it until freed
_TRANSPARENT = (nn.ModuleList, nn.ModuleDict)  # containers, which are not called themselves
# modules that compute differently in evaluation if they have hooks
_UNSAFE_WITH_HOOKS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _Call:
    """A call of a module, with the call of the module around it."""

    __slots__ = ("begin", "name", "parent")

    def __init__(self, name: str, parent: _Call | None, begin: float) -> None:
        self.name, self.parent, self.begin = name, parent, begin

    def inside(self, other: _Call) -> bool:
        """Return True if this call was made during the call `other`, directly or indirectly."""
        at = self.parent
        while at is not None and at is not other:
            at = at.parent
        return at is not None


class ModuleHooks:
    """Hooks that report when modules compute forward and backward.

    Forward is the time between the hooks before and after a module's call. Backward of the call begins when the
    gradient of its output is ready. It ends when the gradient of its input is ready, or that of another call's output,
    whichever is first. The hooks on these tensors only observe; neither the graph nor the results change. (A full
    backward hook of a module would add functions to the graph, after which tensors cannot be changed in place.)

    Args:
        modules: Names and modules.
        report: Called for each call and each backward pass.
        sample: Called with the time at each begin and end of these.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        report: _Report,
        sample: Callable[[float], None] = lambda at: None,
    ) -> None:
        self._report, self._sample, self._on = report, sample, True
        self._forward: list[_Call] = []  # calls under way
        self._backward: list[tuple[_Call, float]] = []  # calls whose backward is under way, with its begin
        self._handles: list[Any] = []
        self._compiled: list[tuple[nn.Module, Any]] = []
        for name, module in modules:
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is not None:  # hooks would be compiled with it
                self._compiled.append((module, compiled))
                module._compiled_call_impl = partial(self._call_compiled, name, compiled)
                continue
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name), prepend=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Remove all hooks."""
        self._on = False
        for handle in self._handles:
            handle.remove()
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled
        self._handles, self._compiled = [], []

    def end_of_backward(self, end: float) -> None:
        """End the backward of all modules, because a backward pass is over at time `end`."""
        self._end_down_to(0, end)

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        call = _Call(name, self._forward[-1] if self._forward else None, time.perf_counter())
        self._forward.append(call)
        self._sample(call.begin)
        if torch.is_grad_enabled():
            x = _first_tensor(args)
            if x is not None and x.requires_grad and not self._has_end_hook(x, call):
                x.register_hook(partial(self._input_ready, call))
                x._watched = (self, call, False)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._forward:
            return
        call = self._forward.pop()
        end = time.perf_counter()
        self._report(call.name, "forward", call.begin, end)
        self._sample(end)
        if torch.is_grad_enabled():
            y = _first_tensor((output,))
            if y is not None and y.grad_fn is not None:
                y.register_hook(partial(self._output_ready, call))
                y._watched = (self, call, True)

    def _has_end_hook(self, x: Any, call: _Call) -> bool:
        """Return True if an existing hook on the input `x` already marks the end of this call's backward.

        The hook belongs to the call that returned `x`, or to an enclosing call that has the same input. Another hook
        would cost microseconds, which add up over all modules.
        """
        by, other, output = getattr(x, "_watched", (None, call, False))
        return by is self and (output or call.inside(other))

    def _call_compiled(self, name: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled module between the hooks."""
        self._before(name, _NONE, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            self._after(_NONE, args, output)
        return output

    def _output_ready(self, call: _Call, gradient: torch.Tensor) -> None:
        """Begin the backward of a call, because the gradient of its output is ready."""
        if not self._on:
            return
        now, under_way = time.perf_counter(), self._backward
        self._sample(now)
        depth = len(under_way)
        while depth and not (call.inside(under_way[depth - 1][0]) or under_way[depth - 1][0].inside(call)):
            depth -= 1
        self._end_down_to(depth, now)
        begin = now
        while depth and under_way[depth - 1][0].inside(call):  # its last module has the same output, and came first
            depth -= 1
            begin = under_way[depth][1]
        under_way.insert(depth, (call, begin))

    def _input_ready(self, call: _Call, gradient: torch.Tensor) -> None:
        """End the backward of a call, because the gradient of its input is ready."""
        for number, (other, _) in enumerate(self._backward):
            if other is call:
                now = time.perf_counter()
                self._sample(now)
                self._end_down_to(number, now)
                return

    def _end_down_to(self, depth: int, end: float) -> None:
        while len(self._backward) > depth:
            call, begin = self._backward.pop()
            if self._on:
                self._report(call.name, "backward", begin, end)


_NONE = nn.Module()


def _first_tensor(values: tuple[Any, ...]) -> Any:
    """Return the first tensor in a module's arguments or results; None if there is none."""
    if values and isinstance(values[0], torch.Tensor):
        return values[0]
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)), None)


def levels_of(module: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Return the modules of a model by depth, the outermost first.

    Modules within a compiled one are left out, and so are modules that compute differently if they have hooks.
    """
    levels: list[list[tuple[str, nn.Module]]] = []
    seen: set[nn.Module] = set()

    def visit(name: str, at: nn.Module, depth: int) -> None:
        for key, child in at.named_children():
            if isinstance(child, _UNSAFE_WITH_HOOKS) or child in seen:
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


def affordable_levels(levels: Sequence[Sequence[object]], calls: int, seconds: float, each: float) -> int:
    """Return the number of levels, at least one, whose hooks take at most `seconds` in a step.

    Args:
        levels: Return value of `levels_of`.
        calls: Calls of each module in a step.
        seconds: Largest time of all hooks in a step.
        each: Time of the hooks of a call and its backward.
    """
    within = sum(modules * calls * each <= seconds for modules in accumulate(map(len, levels)))
    return min(len(levels), max(1, within))


class Recording:
    """Recording of one rank in progress. Making it is collective; ending it is not.

    Args:
        trainer: Trainer of the run.
        clock: Function from `time.perf_counter()` to this rank's time.
        step_seconds: Seconds of forward and backward in the step before.
    """

    def __init__(self, trainer: Run, clock: Callable[[float], float], step_seconds: float) -> None:
        self._trainer, self._clock = trainer, clock
        world, engine = trainer.world, trainer.engine
        self.token = world.broadcast_object(f"{time.time_ns()}")
        self.spans = Spans()
        levels = levels_of(engine.module)
        microbatch = trainer.config.train.microbatch or trainer.samples
        calls = max(1, -(-trainer.samples // (trainer.mesh.readers.size * microbatch)))
        self._memory = StepMemory(trainer)
        passes = calls if engine.pipeline is None else 1  # a pipeline's meter counts the tensors of the whole batch
        seconds = _HOOKS_MAY_COST * step_seconds - passes * engine.meter.tensors * _TENSOR_COST
        affordable = affordable_levels(levels, calls, seconds, _CALL_COST + 4 * self._memory.seconds)
        self.depth = min(world.all_gather_object(affordable))
        self._offsets = [self.offset()]
        modules = [named for level in levels[: self.depth] for named in level]
        self._hooks = ModuleHooks(modules, self.spans.module, self._memory.sample)
        self.spans.after_backward = self._hooks.end_of_backward
        self.spans.at_boundary = lambda: self._memory.sample(time.perf_counter())
        self._unix = time.time()
        self._memory.start()
        engine.clock.skip()  # the time since the last step belongs to no step
        engine.clock.steps, engine.clock.listener = [], self.spans
        world.journal.record(True)

    def offset(self) -> list[float]:
        """Compare clocks; return this rank's time, the offset to add to it, and the error bound. Collective."""
        return list(offset_of(self._trainer.world, lambda: self._clock(time.perf_counter())))

    def stop(self) -> dict[str, Any]:
        """Stop recording, and return the record. Not collective."""
        trainer, clock = self._trainer, self._trainer.engine.clock
        end, totals = time.perf_counter(), clock.totals()
        clock.settle(wait=True)
        steps, clock.steps, clock.listener = clock.steps or [], None, None
        self._hooks.remove()
        operations = trainer.world.journal.take()
        trainer.world.journal.record(False)
        self._memory.stop()
        at = self._clock
        rows = []
        ends = [*steps[1:], (0, end, totals)] if steps else []  # a pure server takes no steps
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
            "left_out": self.spans.dropped,
            "steps": rows,
            "spans": [[kind, name, at(b), at(e), more] for kind, name, b, e, more in self.spans.all()],
            "communication": [[*one[:5], at(one.begin), at(one.end), *one[7:]] for one in operations],
            "waited": self.spans.waited,
            "memory": [[at(when), figures] for when, figures in self._memory.rows()],
            "offsets": self._offsets,
        }


class TimelineRecorder(Callback):
    """Records the steps that monitor.timeline names, once.

    Args:
        config: The settings.
        clock: Function from `time.perf_counter()` to this rank's time, for tests of ranks whose clocks differ.
    """

    def __init__(self, config: Config, clock: Callable[[float], float] = lambda at: at) -> None:
        self._steps = timeline_steps(config.monitor.timeline)
        self._clock = clock
        self._recording: Recording | None = None
        self._done = not config.monitor.timeline
        self._before = 0.0  # seconds of forward and backward until the last synchronization
        self._step_seconds = _UNKNOWN

    def on_fit_start(self, trainer: Run) -> None:
        self._recording = None
        if not self._done:
            self._start_if_due(trainer)

    def on_step_done(self, trainer: Run, step: Step) -> None:
        if self._done or not step.together:
            return
        if self._recording is None:
            self._start_if_due(trainer)
        elif trainer.step >= self._steps[1] or trainer.last_step:
            self._end(trainer, self._recording)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        """Write the record so far, which may explain the error."""
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                write_rank(recording_folder(trainer.folder.path, self._steps), recording.stop())
            except InputError as second:
                trainer.folder.log.info("%s", second)

    def _start_if_due(self, trainer: Run) -> None:
        """Begin to record if a step to be recorded comes before the next synchronization of all ranks."""
        first, last = self._steps
        if trainer.step >= last or trainer.last_step:
            self._done = True
        elif trainer.strategy.next_meeting(trainer) >= first:
            self._recording = Recording(trainer, self._clock, self._step_seconds)
        elif trainer.step >= first - 2:  # the step before the recorded ones limits the time of the hooks
            totals = trainer.engine.clock.totals()
            now = totals["forward"] + totals["backward"]
            if self._before:
                self._step_seconds = now - self._before
            self._before = now

    def _end(self, trainer: Run, recording: Recording) -> None:
        """Write the record, and merge all ranks' records into one timeline on rank 0. Collective."""
        self._recording, self._done = None, True
        recorded = recording.stop()
        recorded["offsets"].append(recording.offset())
        folder = recording_folder(trainer.folder.path, self._steps)
        agree_on_errors(trainer.world, lambda: write_rank(folder, recorded))
        if trainer.world.rank == 0:
            try:
                lines = describe(merge(folder))
            except InputError as error:
                lines = [f"timeline: {error}"]
            for line in lines:
                trainer.say(line)
        trainer.world.barrier()  # otherwise the next step would count the time that rank 0 took as waiting
        trainer.engine.clock.skip()


# -- offsets between the clocks of the ranks, measured by messages
#
# A rank is asked for its time repeatedly. It took this time between the begin and the end of the question, so half the
# duration of the fastest question bounds the error. On each node, the first rank asks the other ranks; all nodes do
# this at the same time. Then rank 0 asks the first rank of each node. The other ranks sleep meanwhile, because with
# more ranks than cores they would delay the answers.
#
# Reference:
#     Cristian 1989, Probabilistic clock synchronization.

Clock = Callable[[], float]
_MIN_QUERIES = 60  # least number of questions to each rank
_MAX_QUERIES = 6000  # largest number of questions, asked while no answer is good
_GOOD_ERROR = 80e-6  # seconds within which a good answer comes
_MAX_SECONDS = 2.0  # most seconds for one rank
_SPIN = 3e-4  # seconds to wait for an answer without a pause
_BURST = 10  # questions between two sleeps of the asking rank: the scheduler runs a rank at once after it has slept
_PAUSE = 1e-3  # seconds between two polls of a waiting rank
_QUERY, _OFFSET, _RESULT = 71, 72, 73  # tags


class Offset(NamedTuple):
    """Difference between rank 0's time and a rank's.

    Attributes:
        at: The rank's time at which the offset holds, in seconds.
        seconds: Seconds to add to the rank's time.
        within: Bound of the error, in seconds.
    """

    at: float
    seconds: float
    within: float


def offset_of(world: Communicator, clock: Clock) -> Offset:
    """Return this rank's offset from rank 0. Collective.

    Args:
        world: All ranks.
        clock: Clock of this rank, in seconds.
    """
    firsts = sorted(world.nodes.index(node) for node in set(world.nodes))
    mine = [rank for rank, node in enumerate(world.nodes) if node == world.node]
    if world.rank not in firsts:
        offset, first_offset = _serve_clock(world, mine[0], clock), torch.empty(2, dtype=torch.float64)
        _sleep_until(world, world.irecv(first_offset, mine[0], _OFFSET))
        seconds, within = first_offset.tolist()
        return Offset(offset.at, offset.seconds + seconds, offset.within + within)
    offset = Offset(clock(), 0.0, 0.0)
    for rank in mine[1:]:
        _query_clock(world, rank, clock)
    if world.rank:
        offset = _serve_clock(world, 0, clock)
    for rank in firsts[1:] if world.rank == 0 else ():
        _query_clock(world, rank, clock)
    for rank in mine[1:]:  # these ranks add the offset of their first rank
        world.send(torch.tensor([offset.seconds, offset.within], dtype=torch.float64), rank, _OFFSET)
    return offset


def _query_clock(world: Communicator, rank: int, clock: Clock) -> None:
    """Ask a rank for its time until the error is small, and send it its offset."""
    question, answer = torch.zeros(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    best, at, seconds = float("inf"), 0.0, 0.0
    began = time.perf_counter()
    for number in range(_MAX_QUERIES):
        enough = best < _GOOD_ERROR or time.perf_counter() - began > _MAX_SECONDS
        last = (number >= _MIN_QUERIES and enough) or number == _MAX_QUERIES - 1
        question[0] = 1.0 if last else 0.0
        if number % _BURST == 0:
            time.sleep(_PAUSE)
        coming = world.irecv(answer, rank, _QUERY)
        begin = clock()
        sent = world.isend(question, rank, _QUERY)
        _wait(world, coming)
        end = clock()
        _wait(world, sent)
        if end - begin < best:
            best, at = end - begin, float(answer[0])
            seconds = (begin + end) / 2 - at
        if last:
            break
    world.send(torch.tensor([at, seconds, best / 2], dtype=torch.float64), rank, _RESULT)


def _serve_clock(world: Communicator, asker: int, clock: Clock) -> Offset:
    """Answer a rank's questions, and return the offset from that rank, which it then sends."""
    question, answer = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    wait: Callable[[Communicator, Work], None] = _sleep_until  # for the first question
    while True:
        wait(world, world.irecv(question, asker, _QUERY))
        wait = _wait
        answer[0] = clock()
        _wait(world, world.isend(answer, asker, _QUERY))
        if question[0]:
            break
    offset = torch.empty(3, dtype=torch.float64)
    world.recv(offset, asker, _RESULT)
    return Offset(*offset.tolist())


def _wait(world: Communicator, work: Work, *, spin: float = _SPIN, pause: float = _SPIN / 3) -> None:
    """Wait for a message, first without pauses and then with them, as the other rank may need this core."""
    began = time.monotonic()
    while not work.done():
        waited = time.monotonic() - began
        if waited > world.process.watchdog.timeout:
            raise CommunicationError("a rank did not answer when clocks were compared; check whether it still runs")
        if waited > spin:
            time.sleep(pause)


def _sleep_until(world: Communicator, work: Work) -> None:
    """Wait for a message with pauses, to leave the cores to other ranks."""
    _wait(world, work, spin=0.0, pause=_PAUSE)
