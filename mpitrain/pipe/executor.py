"""Runs a pipeline program on this rank: the one runtime of all schedules.

The program is compiled once, for a number of microbatches, into a list of bound calls; a batch walks it. Sends and
receives only begin where the program says, and a step waits for its own input alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mpitrain.comm import Work
from mpitrain.errors import InputError
from mpitrain.layers.loss_terms import nothing
from mpitrain.pipe.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    PipelineProgram,
    Receive,
    Send,
    Step,
)
from mpitrain.pipe.simulate import needs
from mpitrain.pipe.stage import Kept, Past, Stage
from mpitrain.pipe.wire import OutputSpec, Wire, as_tuple

Loss = Callable[[Any, Any], torch.Tensor]
Seen = Callable[[Any, Any], None]  # of an output and its targets
Half = Callable[[Stage, Kept, Sequence[torch.Tensor]], list[torch.Tensor]]  # of a backward pass, or all of it
Watched = Callable[[Step, Callable[[], None]], Callable[[], None]]
Known = dict[int, OutputSpec]  # by stage, of microbatches that look alike: the output
Arriving = tuple[list[torch.Tensor], list[Work]]  # from another rank, or (without works) from a stage of this one


@dataclass
class PipelineBatch:
    """What a program is run on.

    Attributes:
        inputs: Of each microbatch, for the first stage.
        targets: Of each microbatch, for the loss.
        weights: Of the loss of each microbatch.
        shares: Of each microbatch in the terms that stages add to the loss.
        known: Of each microbatch, the outputs of stages as far as they are known; others are told by headers.
        seen: Shown the output of each microbatch and its targets, on the last stage's rank; None: nobody.
        losses: By microbatch, weighted; on the last stage's rank.
    """

    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: Sequence[float]
    shares: Sequence[float]
    known: Sequence[Known]
    seen: Seen | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


_NONE = PipelineBatch((), (), (), (), ())


class Executor:
    """One program on one rank.

    Args:
        program: Of all ranks.
        rank: This rank's number in the pipeline.
        stages: This rank's, by number.
        loss: Of an output and a target; None where the last stage is not.
        wire: Carries the messages.
        watched: Given a step and the call that carries it out, returns what is called instead.
    """

    def __init__(
        self,
        program: PipelineProgram,
        rank: int,
        stages: Mapping[int, Stage],
        loss: Loss | None,
        wire: Wire,
        watched: Watched | None = None,
    ) -> None:
        self.schedule = program.schedule
        self.stages, self.loss, self.wire = stages, loss, wire
        self._last = self.schedule.stages - 1
        self._headers = False
        self._batch = _NONE
        self._arriving: dict[tuple[int, int, bool], Arriving] = {}
        self._abandoned: list[dict[tuple[int, int, bool], Arriving]] = []  # MPI may still write there
        self._leaving: dict[tuple[int, int, bool], list[torch.Tensor]] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._past: dict[tuple[int, int], Past] = {}
        self.most_kept = 0  # stage-microbatches held at once, at most, in the last batch
        self._calls: list[Callable[[], None]] = []
        for step in program.steps[rank]:
            need = None if isinstance(step, Send | Receive) else needs(step, self._last)
            if need is not None and need[1] not in stages:
                self._calls.append(partial(self._wait, (need[1], step.microbatch, need[0] is not Forward)))
            call = self._bind(step)
            self._calls.append(call if watched is None else watched(step, call))

    def run(self, batch: PipelineBatch, headers: bool) -> list[torch.Tensor]:
        """Run the program on a batch.

        Args:
            batch: The batch.
            headers: Whether the shapes of all messages are told before them.

        Returns:
            The weighted losses in the order of the microbatches, on the last stage's rank.
        """
        self._batch, self._headers, self.most_kept = batch, headers, 0
        try:
            for call in self._calls:
                call()
            self.wire.finish()
            return [batch.losses[j] for j in sorted(batch.losses)]
        except BaseException:
            self._abandoned.append(self._arriving)
            self._arriving = {}
            raise
        finally:
            self._batch = _NONE
            for held in (self._leaving, self._kept, self._past):
                held.clear()

    def _bind(self, step: Step) -> Callable[[], None]:
        """The call that carries a step out."""
        if isinstance(step, Send):
            return partial(self._send, step.stage, step.microbatch, step.gradient, step.to)
        if isinstance(step, Receive):
            return partial(self._receive, step.stage, step.microbatch, step.gradient, step.source)
        runs: dict[type, Callable[[int, Stage, int], None]] = {
            Forward: self._forward,
            Backward: partial(self._backward, Stage.backward, self._kept.pop),
            BackwardInput: partial(self._backward, Stage.backward_input, self._kept.__getitem__),
            BackwardWeight: lambda n, stage, m: stage.backward_weight(self._kept.pop((n, m))),
        }
        return partial(runs[type(step)], step.stage, self.stages[step.stage], step.microbatch)

    # -- compute

    def _forward(self, number: int, stage: Stage, microbatch: int) -> None:
        """Compute a stage's output of a microbatch, and pass it on."""
        batch = self._batch
        x = batch.inputs[microbatch] if number == 0 else self._input(number - 1, microbatch)
        past = self._past_of(number, microbatch)
        ending = partial(self._ending, microbatch) if number == self._last else None
        output, kept = stage.forward(x, ending, past, batch.shares[microbatch])
        if torch.is_grad_enabled():
            self._kept[number, microbatch] = kept
            self.most_kept = max(self.most_kept, len(self._kept))
        if ending is not None:
            batch.losses[microbatch] = output.detach()
            return
        self._tell(number, microbatch, OutputSpec.of(output))
        self._pass_on(number, microbatch, False, list(as_tuple(output)), number + 1)

    def _past_of(self, number: int, microbatch: int) -> Past | None:
        """The states of the slices before this one; None without slices."""
        slices = self.schedule.slices
        if slices == 1:
            return None
        key = number, microbatch // slices
        past = self._past.setdefault(key, {})
        if microbatch % slices == slices - 1:
            del self._past[key]  # nobody asks again: what backward needs is in each slice's `Kept`
        return past

    def _ending(self, microbatch: int, output: Any) -> torch.Tensor:
        """The microbatch's part of the loss."""
        assert self.loss is not None
        targets, weight = self._batch.targets[microbatch], self._batch.weights[microbatch]
        if self._batch.seen is not None:
            self._batch.seen(output, targets)
        return self.loss(output, targets) * weight if weight else nothing(output)

    def _backward(
        self, run: Half, kept: Callable[[tuple[int, int]], Kept], number: int, stage: Stage, microbatch: int
    ) -> None:
        """Compute gradients of a stage, and pass those of its input on. kept: pops, if no weight half follows."""
        gradients = [] if number == self._last else self._arriving.pop((number + 1, microbatch, True))[0]
        found = run(stage, kept((number, microbatch)), gradients)
        if number > 0:
            self._pass_on(number, microbatch, True, found, number - 1)

    # -- messages

    def _pass_on(self, number: int, microbatch: int, gradient: bool, tensors: list[torch.Tensor], to: int) -> None:
        """Keep a step's results for the Send that follows, or hand them to a stage of this rank."""
        key = number, microbatch, gradient
        if to in self.stages:
            self._arriving[key] = [t.detach() for t in tensors], []
        else:
            self._leaving[key] = tensors

    def _send(self, number: int, microbatch: int, gradient: bool, to: int) -> None:
        """Begin to send what a step made, after its header where one is wanted."""
        if self._headers and not gradient:
            self.wire.send_header(self._batch.known[microbatch][number], to)
        self.wire.send(self._leaving.pop((number, microbatch, gradient)), to, gradient)

    def _receive(self, number: int, microbatch: int, gradient: bool, source: int) -> None:
        """Begin to receive what a step will use, after its header where one is wanted."""
        if self._headers and not gradient:
            self._tell(number, microbatch, self.wire.receive_header(source))
        known = self._batch.known[microbatch]
        specs = known[number - 1].gradients if gradient else known[number].tensors
        self._arriving[number, microbatch, gradient] = self.wire.receive(specs, source, gradient)

    def _wait(self, key: tuple[int, int, bool]) -> None:
        """Wait until tensors from another rank are there."""
        for work in self._arriving[key][1]:
            self.wire.wait(work)

    def _input(self, number: int, microbatch: int) -> Any:
        """The output of stage `number` as input of the next stage, whose graph begins with these tensors."""
        spec = self._batch.known[microbatch][number]
        tensors, _ = self._arriving.pop((number, microbatch, False))
        if torch.is_grad_enabled():
            for t, told in zip(tensors, spec.tensors, strict=True):
                t.requires_grad_(told.gradient)
        return tensors[0] if spec.single else tuple(tensors)

    def _tell(self, number: int, microbatch: int, spec: OutputSpec) -> None:
        """Remember the shapes of a stage's output. Raises InputError where others are remembered."""
        known = self._batch.known[microbatch].setdefault(number, spec)
        if known != spec:
            raise InputError(
                f"stage {number} gave {spec} for microbatch {microbatch}, and {known} for one that looked the same; "
                "make the pipeline with static_shapes=False"
            )
