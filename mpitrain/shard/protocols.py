"""What every placement of parameters and of gradients offers, so that nobody asks which one it has.

    parameters             a rank keeps                  whole                  a forward pass is collective
    ReplicatedParameters   the module's own tensors      always                 no
    PrivateParameters      all, in flat private memory   always                 no
    NodeParameters         one copy per node, shared     always                 no
    ShardedParameters      its shares                    while a unit computes  yes: `gathers`

    gradients              a rank keeps                  reduced                several passes, then one reduction
    WholeGradients         all, in flat memory           at the end, or bucket  yes
                                                         by bucket
    ShardedGradients       its shares of the sums        bucket by bucket       no: `reduces_each_pass`

Which stage of ZeRO takes which is said in `mpitrain.shard.sharding`. The groups, buckets and shares that the methods
speak of are those of `mpitrain.shard.flat` and `mpitrain.layout.Flat`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from mpitrain.shard.flat import FlatGroup

if TYPE_CHECKING:
    from mpitrain.comm import Work
    from mpitrain.shard.reduction import BucketReduction


class Gathered(NamedTuple):
    """Parameters that are gathered in a training step.

    Attributes:
        nbytes: Of them, whole.
        ranks: That gather them from each other.
        times: How often.
    """

    nbytes: float
    ranks: int
    times: int


class Parameters(ABC):
    """The trained parameters of a module, in groups of one dtype and device.

    The methods that are not abstract do what is right where the parameters are always whole.

    Attributes:
        gathers: Whether forward and backward passes gather parameters, so that every rank must take part in each.
    """

    gathers: bool = False

    @abstractmethod
    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a group's layout, which lie in one share of this rank: a view, to be updated."""

    @abstractmethod
    def publish(self) -> None:
        """Show every rank what each of them wrote into its shares. Collective."""

    @abstractmethod
    def nbytes(self) -> float:
        """Bytes of parameters on this rank; of memory that the ranks of a node share, this rank's part."""

    @abstractmethod
    def free(self) -> None:
        """Give each parameter memory of its own again, and release the rest. Collective."""

    def gathered(self, microbatches: int) -> list[Gathered]:
        """What is gathered in a step of so many microbatches."""
        return []

    def buffer_bytes(self) -> int:
        """Bytes of the buffers that parameters are gathered into."""
        return 0

    def whole(self) -> AbstractContextManager[None]:
        """All parameters can be read inside. Collective where the parameters are sharded."""
        return nullcontext()

    def watch_saved(self, saved: Callable[[torch.Tensor], object]) -> AbstractContextManager[None]:
        """Inside, call `saved` with each tensor that autograd keeps and that saved-tensor hooks outside do not see."""
        return nullcontext()

    def gradients_taken(self, bucket: int) -> None:
        """Told by the gradients, once for each group: those of this bucket have been taken from its parameters."""
        return

    def end_of_backward(self) -> None:
        """A backward pass is over: nobody computes with the parameters until the next forward pass."""
        return


class Gradients(ABC):
    """The gradients of parameters, which are taken and reduced in buckets numbered through all groups.

    A bucket is started when a backward pass has finished all its parameters, in the same order on every rank; `end`
    completes what was started.

    Attributes:
        groups: The parameters and where each lies.
        reduction: Over which ranks gradients are reduced, and how.
        reduces_each_pass: Whether every backward pass must be reduced, because no rank has room for all gradients.
        at_once: Flat tensors, one a group, that hold everything and may be reduced by one operation each at the end of
            backward; None where buckets must be started one by one.
        reduced: Called with the number of a bucket when this rank's share of it has been reduced in some pass, as far
            as that happens bucket by bucket.
    """

    groups: Sequence[FlatGroup]
    reduction: BucketReduction
    reduces_each_pass: bool
    at_once: list[torch.Tensor] | None
    reduced: Callable[[int], object] | None = None

    @property
    @abstractmethod
    def flat(self) -> list[torch.Tensor]:
        """What this rank keeps, one flat tensor a group: all gradients, or its shares of the reduced ones."""

    @abstractmethod
    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Memory in the parameter's shape in which its next gradient can be computed, to become its `.grad`.

        None where something is there already; given away at most once a pass.
        """

    @abstractmethod
    def arrived(self, parameter: nn.Parameter) -> None:
        """Autograd has finished the parameter's gradient in this backward pass."""

    @abstractmethod
    def start(self, bucket: int, background: bool) -> Work | None:
        """Take a bucket's gradients and begin to reduce them; background: while backward goes on."""

    @abstractmethod
    def end(self, works: Sequence[Work | None]) -> None:
        """Complete the reductions started since the last `end`; works: what `start` returned for them."""

    @abstractmethod
    def zero(self) -> None:
        """Forget all gradients, for the next step."""

    @abstractmethod
    def settle(self) -> None:
        """Take over what the parameters' `.grad` are now, with zeros where there is none."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients, in place."""

    @abstractmethod
    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """The reduced gradients [lo, hi) of a group's layout, which lie in one share of this rank; a view."""

    @abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """Bytes of gradients, and of the buffers they are reduced in."""

    @abstractmethod
    def free(self) -> None:
        """Release the memory. Collective."""
