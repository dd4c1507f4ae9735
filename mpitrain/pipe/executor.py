"""Executor that runs a pipeline program on this rank, for every schedule.

A program is compiled once for each number of microbatches into a list of bound calls, and a batch runs through that
list. Sends and receives only start where the program lists them; a step waits only for its own input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mpitrain.comm import Work
from mpitrain.comm.memory.device import CPU, generator_state, is_accelerator
from mpitrain.errors import InputError
from mpitrain.layers.loss_terms import zero_loss
from mpitrain.pipe.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    PipelineProgram,
    Receive,
    Send,
    Step,
)
from mpitrain.pipe.simulate import needs
from mpitrain.pipe.stage import Past, SavedForward, Stage
from mpitrain.pipe.versions import WeightVersions
from mpitrain.pipe.wire import OutputSpec, StageMessages, as_tuple

Loss = Callable[[Any, Any], torch.Tensor]
Seen = Callable[[Any, Any], None]  # called with an output and its targets
# one half of a backward pass, or all of it
Half = Callable[[Stage, SavedForward, Sequence[torch.Tensor]], list[torch.Tensor]]
Watched = Callable[[Step, Callable[[], None]], Callable[[], None]]
KnownSpecs = dict[int, OutputSpec]  # output spec by stage, for microbatches of the same shapes
Arriving = tuple[list[torch.Tensor], list[Work]]  # from another rank, or (without works) from this one


@dataclass
class PipelineBatch:
    """Data that a program runs on.

    Attributes:
        inputs: Input of each microbatch, for the first stage.
        targets: Targets of each microbatch, for the loss.
        weights: Weight of each microbatch's loss.
        shares: Share of each microbatch in the loss terms that stages add.
        known: Output specs of each microbatch by stage, as far as they are known; headers carry the others.
        seen: Function called with each microbatch's output and targets on the last stage's rank; None for none.
        seed_next: Function called before the first forward step of the next batch.
        begun: Results of the steps that the batch before has taken of this one; None without such steps.
        losses: Weighted loss by microbatch, filled on the last stage's rank.
    """

    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: Sequence[float]
    shares: Sequence[float]
    known: Sequence[KnownSpecs]
    seen: Seen | None = None
    seed_next: Callable[[], None] = lambda: None
    begun: BegunBatch | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Upcoming:
    """The batch after the present one, whose first steps a schedule may take already.

    Attributes:
        microbatches: Pairs (x, y), as for `Pipeline.forward_backward`.
        weights: Weight of each microbatch's loss.
        seed: Function that seeds the random generators for the batch.
    """

    microbatches: Sequence[tuple[Any, Any]]
    weights: Sequence[float]
    seed: Callable[[], None] = lambda: None


@dataclass
class BegunBatch:
    """Results of a batch's steps that were taken during the batch before.

    Attributes:
        arriving: Tensors that wait for a step, as in the executor.
        saved: Data that stages keep for backward steps.
        losses: Weighted loss by microbatch.
        known: Output specs of the microbatches that have begun.
        random: States of the random generators, after the forward steps.
    """

    arriving: dict[tuple[int, int, bool], Arriving]
    saved: dict[tuple[int, int], SavedForward]
    losses: dict[int, torch.Tensor]
    known: Sequence[KnownSpecs]
    random: list[tuple[torch.device, torch.Tensor]]


_NONE = PipelineBatch((), (), (), (), ())


class Executor:
    """Compiled program of one rank.

    Args:
        program: Program of all ranks.
        rank: This rank's number in the pipeline.
        stages: Stages of this rank, by stage number.
        loss: Loss function of (output, targets); None on ranks without the last stage.
        messages: Messages between the ranks of the pipeline.
        watched: Function of (step, call) that returns the call to make instead, such as a timed one; None for none.
        versions: Weights to select before each step, for a schedule that begins the next batch; None for one version.

    Attributes:
        peak_in_flight: Largest number of (stage, microbatch) pairs that were in flight at once in the last batch.
        next_begun: Results of the last batch's steps for the batch after it; None without such steps.
    """

    def __init__(
        self,
        program: PipelineProgram,
        rank: int,
        stages: Mapping[int, Stage],
        loss: Loss | None,
        messages: StageMessages,
        watched: Watched | None = None,
        versions: WeightVersions | None = None,
    ) -> None:
        self.schedule = program.schedule
        self.stages, self.loss, self.messages = stages, loss, messages
        self._last = self.schedule.stages - 1
        self._headers = False
        self._batch = _NONE
        self._arriving: dict[tuple[int, int, bool], Arriving] = {}
        self._abandoned: list[dict[tuple[int, int, bool], Arriving]] = []  # MPI may still write there
        self._leaving: dict[tuple[int, int, bool], list[torch.Tensor]] = {}
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._past: dict[tuple[int, int], Past] = {}
        self.peak_in_flight = 0  # see the class's docstring
        self.next_begun: BegunBatch | None = None
        self._calls: list[Callable[[], None]] = []
        for step in program.steps[rank]:
            need = None if isinstance(step, Send | Receive) else needs(step, self._last)
            if need is not None and need[1] not in stages:
                self._calls.append(partial(self._wait, (need[1], step.microbatch, need[0] is not Forward)))
            if versions is not None and isinstance(step, Compute):
                self._calls.append(partial(versions.select, step.microbatch >= self.schedule.microbatches))
                if isinstance(step, Forward) and step.microbatch == self.schedule.microbatches:
                    self._calls.append(lambda: self._batch.seed_next())
            call = self._bind(step)
            self._calls.append(call if watched is None else watched(step, call))

    def run(self, batch: PipelineBatch, headers: bool) -> list[torch.Tensor]:
        """Run the program on a batch.

        Args:
            batch: Inputs, targets and weights of the microbatches.
            headers: If true, a header with the shapes precedes each message with an output.

        Returns:
            The weighted losses in the order of the microbatches; empty except on the last stage's rank.
        """
        self._batch, self._headers, self.peak_in_flight = batch, headers, 0
        self.next_begun = None
        if batch.begun is not None:
            self._arriving, batch.losses = batch.begun.arriving, batch.begun.losses
            for (number, microbatch), saved in batch.begun.saved.items():
                if saved.compute_loss is not None:
                    saved.compute_loss = partial(self._compute_loss, microbatch)
                self._saved[number, microbatch] = saved
        try:
            for call in self._calls:
                call()
            self.messages.finish()
            if self.schedule.after:
                self.next_begun = self._take_begun(batch)
            return [batch.losses[j] for j in sorted(batch.losses)]
        except BaseException:
            self._abandoned.append(self._arriving)
            self._arriving = {}
            raise
        finally:
            self._batch = _NONE
            for store in (self._leaving, self._saved, self._past):
                store.clear()

    def _take_begun(self, batch: PipelineBatch) -> BegunBatch:
        """Return what the next batch needs of its steps in this one, with its microbatches numbered from 0."""
        count, losses = self.schedule.microbatches, batch.losses
        arriving = {(s, j - count, gradient): of for (s, j, gradient), of in self._arriving.items()}
        saved = {(s, j - count): of for (s, j), of in self._saved.items()}
        batch.losses = {j: losses[j] for j in losses if j < count}
        ahead = {j - count: losses[j] for j in losses if j >= count}
        on = {CPU, *(t.device for of in saved.values() for t in of.outputs if is_accelerator(t.device))}
        random = [(device, generator_state(device)) for device in on]
        self._arriving = {}
        return BegunBatch(arriving, saved, ahead, batch.known[count:], random)

    def _bind(self, step: Step) -> Callable[[], None]:
        """Return the call that carries out a step."""
        if isinstance(step, Send):
            return partial(self._send, step.stage, step.microbatch, step.gradient, step.to)
        if isinstance(step, Receive):
            return partial(self._receive, step.stage, step.microbatch, step.gradient, step.source)
        runs: dict[type, Callable[[int, Stage, int], None]] = {
            Forward: self._forward,
            Backward: partial(self._backward, Stage.backward, self._saved.pop),
            BackwardInput: partial(self._backward, Stage.backward_input, self._saved.__getitem__),
            BackwardWeight: lambda n, stage, m: stage.backward_weight(self._saved.pop((n, m))),
        }
        return partial(runs[type(step)], step.stage, self.stages[step.stage], step.microbatch)

    # -- compute

    def _forward(self, number: int, stage: Stage, microbatch: int) -> None:
        """Compute a stage's output for a microbatch, and pass it on."""
        batch = self._batch
        x = batch.inputs[microbatch] if number == 0 else self._input(number - 1, microbatch)
        past = self._past_of(number, microbatch)
        compute_loss = partial(self._compute_loss, microbatch) if number == self._last else None
        output, saved = stage.forward(x, compute_loss, past, batch.shares[microbatch])
        if torch.is_grad_enabled():
            self._saved[number, microbatch] = saved
            self.peak_in_flight = max(self.peak_in_flight, len(self._saved))
        if compute_loss is not None:
            batch.losses[microbatch] = output.detach()
            return
        self._record_spec(number, microbatch, OutputSpec.of(output))
        self._pass_on(number, microbatch, False, list(as_tuple(output)), number + 1)

    def _past_of(self, number: int, microbatch: int) -> Past | None:
        """Return the states of the earlier slices of this sequence; None without slices."""
        slices = self.schedule.slices
        if slices == 1:
            return None
        key = number, microbatch // slices
        past = self._past.setdefault(key, {})
        if microbatch % slices == slices - 1:
            del self._past[key]  # not needed any more: each slice's `SavedForward` has what backward needs
        return past

    def _compute_loss(self, microbatch: int, output: Any) -> torch.Tensor:
        """Return the weighted loss of a microbatch's output."""
        assert self.loss is not None
        targets, weight = self._batch.targets[microbatch], self._batch.weights[microbatch]
        if self._batch.seen is not None:
            self._batch.seen(output, targets)
        return self.loss(output, targets) * weight if weight else zero_loss(output)

    def _backward(
        self,
        run: Half,
        take_saved: Callable[[tuple[int, int]], SavedForward],
        number: int,
        stage: Stage,
        microbatch: int,
    ) -> None:
        """Compute gradients of a stage, and pass on those of its input.

        Args:
            run: Backward pass, or the half of it, to call.
            take_saved: Lookup of the stage's saved forward data; it removes the data unless a weight half follows.
            number: Number of the stage.
            stage: Blocks of the stage.
            microbatch: Number of the microbatch.
        """
        gradients = [] if number == self._last else self._arriving.pop((number + 1, microbatch, True))[0]
        input_gradients = run(stage, take_saved((number, microbatch)), gradients)
        if number > 0:
            self._pass_on(number, microbatch, True, input_gradients, number - 1)

    # -- messages

    def _pass_on(self, number: int, microbatch: int, gradient: bool, tensors: list[torch.Tensor], to: int) -> None:
        """Keep a step's results for the Send that follows, or give them to the next stage on this rank."""
        key = number, microbatch, gradient
        if to in self.stages:
            self._arriving[key] = [t.detach() for t in tensors], []
        else:
            self._leaving[key] = tensors

    def _send(self, number: int, microbatch: int, gradient: bool, to: int) -> None:
        """Start sending a step's results, after a header if headers are on."""
        if self._headers and not gradient:
            self.messages.send_header(self._batch.known[microbatch][number], to)
        self.messages.send(self._leaving.pop((number, microbatch, gradient)), to, gradient)

    def _receive(self, number: int, microbatch: int, gradient: bool, source: int) -> None:
        """Start receiving the input of a later step, after its header if headers are on."""
        if self._headers and not gradient:
            self._record_spec(number, microbatch, self.messages.receive_header(source))
        known = self._batch.known[microbatch]
        specs = known[number - 1].gradients if gradient else known[number].tensors
        self._arriving[number, microbatch, gradient] = self.messages.receive(specs, source, gradient)

    def _wait(self, key: tuple[int, int, bool]) -> None:
        """Wait until the tensors from another rank have arrived."""
        for work in self._arriving[key][1]:
            work.wait()

    def _input(self, number: int, microbatch: int) -> Any:
        """Return the output of stage `number` as the input of the next stage, whose graph starts at these tensors."""
        spec = self._batch.known[microbatch][number]
        tensors, _ = self._arriving.pop((number, microbatch, False))
        if torch.is_grad_enabled():
            for t, tensor_spec in zip(tensors, spec.tensors, strict=True):
                t.requires_grad_(tensor_spec.gradient)
        return tensors[0] if spec.single else tuple(tensors)

    def _record_spec(self, number: int, microbatch: int, spec: OutputSpec) -> None:
        """Remember the shapes of a stage's output. Raises InputError if they differ from the remembered ones."""
        known = self._batch.known[microbatch].setdefault(number, spec)
        if known != spec:
            raise InputError(
                f"stage {number} returned {spec} for microbatch {microbatch}, but {known} for an earlier "
                "microbatch of the same shapes; create the pipeline with static_shapes=False"
            )
