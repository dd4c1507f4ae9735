"""Reduction of gradients over the ranks while backward computes them.

A hook on each parameter records that its gradient is complete. When all gradients of a bucket are complete and all
earlier buckets have been started, the bucket's reduction starts, in the same order on every rank.

That order is at first the reverse order of registration. The first backward pass traces the order in which gradients
are finished, and all ranks start buckets in the order of rank 0 from then on (Li et al. 2020, PyTorch Distributed,
section 6.2.1). The order is traced again every `RETRACE` passes, in case the graph has changed.

If no core is free for communication, nothing would overlap. Whole gradients are then reduced in one operation at the
end of backward. Small gradients are then moved to their buckets together. Their parameters need no hooks, each of which
costs about a microsecond: a hook on the output announces the backward pass, and at its end the new gradients are there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mpitrain.comm import Communicator, Work
from mpitrain.errors import CommunicationError, InputError
from mpitrain.shard.flat import bucket_indices
from mpitrain.shard.gradients import Gradients
from mpitrain.shard.in_place import InPlace, accumulator_of, will_accumulate

RETRACE = 32  # passes


class Reducer:
    """Watches the backward passes of some parameters, and reduces their gradients bucket by bucket.

    Args:
        gradients: Storage of the gradients, which also lists the parameters.
        names: Names of the parameters, for messages.
        module: Module of the parameters, whose layers compute gradients in flat memory (see `in_place`); None if
            gradients are not computed by autograd's backward pass. Otherwise `announce` must be called before each one.
        unused_allowed: If true, parameters without a gradient count as zero; if false, they raise an error with their
            names.
        static: If true, every backward pass uses the same parameters, the same number of times, as the first one.
        forget_unused: If true, parameters that no rank used get no gradient, so that optimizers skip them.

    Attributes:
        enabled: If true, backward passes are reduced; if false, gradients are only accumulated.
        paused: If true, backward passes are those of a later step, and their gradients stay where they are.
        last: If true, no more backward passes are expected before the step, after this one.
        order: Parameters in the order in which their gradients are finished, as traced on rank 0 and the same on every
            rank; before the first trace, and if buckets are not started during backward, the order of the layout.
        dropped: Parameters of which no rank computes a gradient in this step. Their gradients are zero, and buckets
            that contain no other gradient are not sent.
        passes: Number of backward passes reduced so far.
        factor: Factor by which the result of a reduction is multiplied.
    """

    def __init__(
        self,
        gradients: Gradients,
        names: Mapping[nn.Parameter, str],
        module: nn.Module | None,
        *,
        unused_allowed: bool = False,
        static: bool = False,
        forget_unused: bool = True,
    ) -> None:
        self.gradients, self.names = gradients, names
        self.unused_allowed, self.static = unused_allowed, static
        self.enabled = self.last = True
        self.paused = False
        self.passes = 0
        self.factor = 1.0
        self._unused: set[nn.Parameter] | None = None  # in every pass since `take_unused`; None before the first pass
        self._forget = forget_unused and (unused_allowed or static)
        self._by_bucket = gradients.reduction.overlaps or gradients.reduces_each_pass
        buckets = [gradients.groups[g].members(b) for g, b in bucket_indices(gradients.groups)]
        self.dropped: set[nn.Parameter] = set()
        self._members = [[p for p, _ in of] for of in buckets]
        self._bucket = {p: number for number, members in enumerate(buckets) for p, _ in members}
        self.order = list(self._bucket)
        self._traces = self._by_bucket and module is not None
        self._came: list[nn.Parameter] = []  # parameters in the order of their gradients in this pass
        self._before: list[nn.Parameter] = []  # the same of the pass before
        self._total = len(buckets)
        self._expected = dict.fromkeys(self._bucket, 1)  # gradients of each parameter in one backward pass
        self._counts: dict[nn.Parameter, int] = {}
        self._touched: set[nn.Parameter] = set()  # parameters that got a gradient since the last reduction
        self._missing: list[int] = []  # by bucket, number of parameters whose gradients are missing
        self._works: dict[int, Work | None] = {}  # of the buckets started so far
        self._in_backward = self._accumulated = False  # accumulated: in a pass since the last reduction
        self._arrived: list[nn.Parameter] = []  # parameters that got a gradient and are not yet in `_touched`
        self._anywhere = np.ones(len(self._bucket), dtype=np.uint8)  # 1 for a parameter that some rank used
        # places of parameters without a hook; reproducible gradients move several times in a step, so all are recorded
        unwatched = module is not None and not self._by_bucket and not gradients.reduction.reproducible
        # one keeps its hook, the first of the module: passes that start elsewhere than in an output nearly all reach it
        late = list(self._bucket)[:-1] if unwatched else []
        self._late = {p: at for p in late if (at := gradients.late_place(p)) is not None}
        self._accumulators = [accumulator_of(p) for p in self._late]
        self._hooks: list[Any] = []
        self._watch([p for p in self._bucket if p not in self._late])
        self._in_place = InPlace(module, self._bucket, gradients) if module is not None else None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._in_place is not None:
            self._in_place.remove()

    def replace(self, earlier: Reducer) -> None:
        """Replace another reducer of the same parameters, which is already closed, and take over its gradients."""
        for parameter in self._bucket:
            if parameter.grad is not None:
                self.gradients.mark_ready(parameter)
        self.passes, self.factor, self.enabled = earlier.passes, earlier.factor, earlier.enabled
        self._accumulated = earlier._accumulated
        self._expected.update(earlier._expected)
        self._touched = earlier._all_touched()
        earlier.gradients.free()

    def _watch(self, parameters: Collection[nn.Parameter]) -> None:
        """Register hooks on parameters."""
        self._hooks += [p.register_post_accumulate_grad_hook(self._hook) for p in parameters]

    def announce(self, output: Any) -> None:
        """Prepare for a backward pass that will go through an output of the module, or through a loss.

        Args:
            output: Nested structure of tensors. If backward cannot go through any of them, all parameters get hooks.
        """
        if not self._late or not torch.is_grad_enabled():
            return
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        for tensor in tensors:
            tensor.register_hook(self._on_backward)
        if not tensors:
            self._watch(self._late)
            self._late, self._accumulators = {}, []

    def _on_backward(self, _: torch.Tensor) -> None:
        """Take note of a backward pass that has just begun (hook on an output)."""
        if not self._in_backward and any(map(will_accumulate, self._accumulators)):
            if self.enabled:
                self._begin()
            else:
                self._accumulated = True

    def _refuse_sparse(self, parameter: nn.Parameter) -> None:
        """Raise InputError if the parameter's gradient is sparse."""
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise InputError(
                f"the gradient of {self.names[parameter]} is sparse and cannot be reduced; create its layer with "
                "sparse=False"
            )

    def _hook(self, parameter: nn.Parameter) -> None:
        """Record a parameter's new gradient, and start the buckets that are ready.

        This is the hook that runs after autograd has added to the parameter's `.grad`.
        """
        if self.paused:
            return
        self._refuse_sparse(parameter)
        self._arrived.append(parameter)
        if self.enabled and not self._in_backward:
            self._begin()
        if not self.enabled or not self._by_bucket:
            self.gradients.mark_ready(parameter)
            return
        bucket = self._bucket[parameter]
        if bucket in self._works and not self._expected[parameter]:
            raise InputError(
                f"{self.names[parameter]} got a gradient, but none in the first backward pass, and static_graph=True "
                "requires the same parameters in every pass; remove static_graph=True"
            )
        if bucket in self._works:
            raise InputError(
                f"{self.names[parameter]} got a second gradient in one backward pass after the first was sent, as with "
                "activation checkpointing and use_reentrant=True; set use_reentrant=False, or static_graph=True"
            )
        self.gradients.mark_ready(parameter)
        count = self._counts.get(parameter, 0) + 1
        self._counts[parameter] = count
        if count == self._expected[parameter]:
            self._came.append(parameter)
            self._missing[bucket] -= 1
            if self.passes or not self.static:
                self._start_ready()

    def _begin(self) -> None:
        """Expect the gradients of a new backward pass, and have autograd call `finish` at its end."""
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._expect()

    def _expect(self) -> None:
        """Count the gradients that each bucket waits for."""
        self._counts, self._works, self._before, self._came = {}, {}, self._came, []
        if not self._by_bucket:
            return
        self._missing = [0] * self._total
        for parameter, times in self._expected.items():
            self._missing[self._bucket[parameter]] += times > 0 and parameter not in self.dropped

    def _start_ready(self, everything: bool = False) -> None:
        """Start buckets in order, up to the first one that lacks gradients or, with `everything`, all of them."""
        background, order = self.gradients.reduction.overlaps, self.gradients.order
        while len(self._works) < self._total:
            bucket = order[len(self._works)]
            if not everything and self._missing[bucket] > 0:
                break
            if self.dropped and self._is_dropped(bucket):
                self.gradients.skip(bucket)
                self._works[bucket] = None
                continue
            self._works[bucket] = self.gradients.start(bucket, background)

    def _is_dropped(self, bucket: int) -> bool:
        """Return True if no rank has gradients of a bucket. Copies of tied parameters may have got them elsewhere."""
        members = self._members[bucket]
        return bool(members) and self.dropped.issuperset(members) and self._all_touched().isdisjoint(members)

    def finish(self) -> None:
        """Complete the reduction of all buckets. Collective.

        Autograd calls this at the end of backward. A rank must call it itself if it has no backward pass, or if its
        gradients were accumulated while `enabled` was false.
        """
        alone = not self._in_backward
        if alone:
            self._expect()
        late = [p.grad for p in self._late]  # Python makes an object for each, which `copy_in` uses too
        lacking = self._without_gradient(late, alone or self._accumulated)
        self._in_backward = self._accumulated = False
        unused = [p for p in lacking if self._expected[p]]
        if unused and not alone and not self.unused_allowed and not (self.static and not self.passes):
            raise CommunicationError(self._unused_message(unused))
        try:
            self.gradients.copy_in()
        except RuntimeError:
            for parameter in self._late:
                self._refuse_sparse(parameter)
            raise
        flats = self.gradients.reduced_at_end
        if flats is None or self.dropped:
            self._start_ready(everything=True)
            self.gradients.end(list(self._works.values()))
        else:
            for number, flat in enumerate(flats):
                self.gradients.reduction.sum(flat, number, None, background=False)
        if self.factor != 1.0:
            self.gradients.scale(self.factor)
        if self.static and not self.passes and not alone:
            times = self._counts if self._by_bucket else dict.fromkeys(set(self._bucket).difference(lacking), 1)
            self._expected = {p: times.get(p, 0) for p in self._bucket}
        if self._forget:
            for parameter in self._unused_by_all(lacking, self.gradients.reduction.comm):
                parameter.grad = None
        self._unused = set(lacking) if self._unused is None else self._unused.intersection(lacking)
        self._touched.clear()
        self.passes += 1
        if self._traces and (self.passes == 1 or self.passes % RETRACE == 0):
            self._trace()

    def _trace(self) -> None:
        """Start buckets from now on in the order in which rank 0 finishes them, if two passes agree. Collective."""
        parameters = list(self._bucket)
        numbers = {p: n for n, p in enumerate(parameters)}
        order, came, before = ([numbers[p] for p in of] for of in (self.order, self._came, self._before))
        common, dropped = set(came).intersection(before), {numbers[p] for p in self.dropped}.difference(came)
        first, second = ([n for n in of if n in common] for of in (before, came))
        if came and (first == second or self.passes == 1):
            finished = iter(dict.fromkeys([*came, *(n for n in numbers.values() if n not in dropped)]))
            order = [n if n in dropped else next(finished) for n in order]
        self.order = [parameters[n] for n in self.gradients.agree(order)]
        last = {self._bucket[p]: n for n, p in enumerate(self.order)}  # by bucket, its last gradient
        self.gradients.set_order(sorted(self.gradients.order, key=lambda bucket: last.get(bucket, -1)))

    @property
    def is_reduced(self) -> bool:
        """True if no gradient has been accumulated since the last reduction."""
        return self.passes > 0 and not self._accumulated and not self._all_touched()

    def _without_gradient(self, late: Sequence[torch.Tensor | None], several: bool) -> list[nn.Parameter]:
        """Return the parameters that got no gradient since the last reduction.

        Args:
            late: Gradients of the parameters without a hook.
            several: If true, also passes before the one that now ends may have added to gradients.
        """
        touched = self._all_touched()
        lacking = [
            p
            for (p, place), grad, accumulator in zip(self._late.items(), late, self._accumulators, strict=True)
            if grad is None or (grad is place and not (several or will_accumulate(accumulator)))
        ]
        if len(touched) + len(self._late) < len(self._bucket):
            lacking += [p for p in self._bucket if p not in touched and p not in self._late]
        return [p for p in lacking if p not in self.dropped] if self.dropped else lacking

    def _all_touched(self) -> set[nn.Parameter]:
        """Return the parameters that got a gradient since the last reduction."""
        self._touched.update(self._arrived)
        self._arrived.clear()
        return self._touched

    def touched(self) -> set[nn.Parameter]:
        """Return the parameters that got a gradient since the last reduction, as a set that callers may extend.

        Gradients that were not computed by a backward pass with hooks must still be the parameters' `.grad`.
        """
        self._touched |= {p for p in self._bucket if p.grad is not None}
        return self._all_touched()

    def forget_accumulated(self) -> None:
        """Forget the passes since the last reduction, whose gradients the caller has set to zero."""
        self._all_touched().clear()
        self._accumulated = False

    def take_unused(self, comm: Communicator) -> set[nn.Parameter]:
        """Return the parameters that no rank of `comm` used since the last call. Collective unless they are forgotten.

        If each pass forgets the gradients of such parameters (`forget_unused`), the result is empty.
        """
        if self._forget:
            return set()
        unused, self._unused = self._bucket if self._unused is None else self._unused, None
        return set(self._unused_by_all(unused, comm))

    def _unused_by_all(self, unused: Collection[nn.Parameter], comm: Communicator) -> list[nn.Parameter]:
        """Return the parameters that no rank used, where `unused` are those that this rank did not use. Collective."""
        missing = set(unused)
        self._anywhere[:] = [p not in missing for p in self._bucket] if missing else 1
        comm.all_reduce(self._anywhere, "max")
        nowhere = self._anywhere == 0
        return [p for p, none in zip(self._bucket, nowhere, strict=True) if none] if nowhere.any() else []

    def _unused_message(self, unused: Sequence[nn.Parameter]) -> str:
        """Return the error message about parameters that got no gradient."""
        names = [self.names[p] for p in unused]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        fix = (
            "they had one in the first, and static_graph=True requires the same in every pass; remove static_graph=True"
            if self.static
            else "use them in the loss, or set find_unused_parameters=True"
        )
        return f"{len(names)} parameters got no gradient in this backward pass: {shown}; {fix}"
