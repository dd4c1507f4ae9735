"""What a model costs one rank, block by block, as whoever plans a layout asks a model profile for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.errors import InputError

REPLICAS = "replicas"


@dataclass(frozen=True)
class AxisExchange:
    """A collective operation in the midst of a pass.

    Attributes:
        operation: all_reduce, all_gather or reduce_scatter.
        nbytes: Bytes of the whole vector on one rank (of all_gather: of the result).
        axis: Name of the axis whose ranks take part; REPLICAS: all ranks with the same part of the model, over which
            batch norms sum up.
    """

    operation: str
    nbytes: int
    axis: str = "tensor"


@dataclass(frozen=True)
class Weight:
    """A parameter, as far as one tensor rank has it.

    Attributes:
        name: In the whole model.
        numel: Elements.
        replicated: Whether every tensor rank has the same.
        trained: Whether it requires a gradient.
        same_as: The name of the parameter of an earlier block that it is one with (tied); empty for none.
    """

    name: str
    numel: int
    replicated: bool = True
    trained: bool = True
    same_as: str = ""


@dataclass(frozen=True)
class BlockCost:
    """A block as one rank computes it for one microbatch, without communication.

    Attributes:
        name: In the whole model.
        forward: Seconds of the forward pass (with the loss, on the last block) while all cores of the node, or the
            rank's device, are as busy as in training.
        input: Seconds of the gradients of its input.
        weight: Seconds of the gradients of its parameters.
        kept: Bytes that autograd keeps from the forward pass until backward, parameters not counted.
        taken: Bytes of its input, which is all that is kept with recompute.
        given: Bytes of its output, as sent to a next stage.
        working: Bytes that are needed beside those kept while it computes forward or backward, at most.
        weights: Its parameters, in the order of registration.
        forwards: Exchanges in the forward pass.
        backwards: Exchanges in the backward pass.
        later: Seconds that the gradients of its parameters take more where they are added to earlier ones.
    """

    name: str
    forward: float
    input: float
    weight: float
    kept: int
    taken: int
    given: int
    working: int
    weights: tuple[Weight, ...]
    forwards: tuple[AxisExchange, ...] = ()
    backwards: tuple[AxisExchange, ...] = ()
    later: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the forward and the backward pass."""
        return self.forward + self.input + self.weight

    @property
    def numel(self) -> int:
        """Elements of its parameters that no earlier block has."""
        return sum(weight.numel for weight in self.weights if not weight.same_as)

    @property
    def is_unit(self) -> bool:
        """Whether it is one of a list of blocks of the model: gathered, and recomputed, by itself (`shard.flat`)."""
        return self.name.rpartition(".")[2].isdigit()


@dataclass(frozen=True)
class Divided:
    """How one rank's part of the model is cut out, before it is cut into stages.

    Attributes:
        tensor: Ranks of the tensor axis.
        sequence: Whether activations are divided along the sequence between divided layers.
        whole: Patterns of layers that stay whole.
        slices: Pieces of a sequence that go through the pipeline by themselves.
        synchronized: Whether batch norms are those of several ranks together.
        axes: parallel.axes.
    """

    tensor: int = 1
    sequence: bool = False
    whole: tuple[str, ...] = ()
    slices: int = 1
    synchronized: bool = False
    axes: tuple[tuple[str, int], ...] = ()


class ModelProfile(ABC):
    """What the planner knows of a model, its precision and its batch.

    Attributes:
        batch: Global batch in samples.
        precision: fp32, bf16 or fp16.
        moments: fp32 numbers that the optimizer keeps per parameter (Adam: 2).
        sample_bytes: Bytes of a sample's input and target.
        listed: Whether the model lists its blocks, so that it can be cut into stages.
        divisible: Whether the model says how its layers are divided over tensor ranks.
        synchronous: Whether it has batch norms, so that every rank needs as many microbatches as any other.
        has_units: Whether it has blocks that are recomputed, or compiled, by themselves (see `shard.flat`).
        order: Names of all parameters in the order of registration, which is that of flat gradients reversed.
    """

    batch: int
    precision: str
    moments: int
    sample_bytes: int
    listed: bool
    divisible: bool
    synchronous: bool = False
    has_units: bool = True
    order: Sequence[str]

    @abstractmethod
    def blocks(self, samples: int, divided: Divided = Divided(), threads: int = 1) -> tuple[BlockCost, ...]:
        """The blocks in order, for a microbatch (or a slice of one) of so many samples.

        Args:
            samples: Of the microbatch, at least 1.
            divided: How layers and sequences are divided.
            threads: That a rank computes with.

        Raises:
            InputError: The model cannot be divided so.
        """

    def takes(self, divided: Divided) -> bool:
        """Whether the model can be divided so, as far as that is known without a pass through it."""
        try:
            self.blocks(1, divided)
        except InputError:
            return False
        return True
