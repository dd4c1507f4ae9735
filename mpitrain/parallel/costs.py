"""Cost of a model on one rank, block by block, as a model profile reports it to the planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.errors import InputError

REPLICAS = "replicas"


@dataclass(frozen=True)
class AxisExchange:
    """A collective operation within a forward or backward pass.

    Attributes:
        operation: all_reduce, all_gather or reduce_scatter.
        nbytes: Bytes of the whole vector on one rank (for all_gather: of the result).
        axis: Name of the axis whose ranks take part, or REPLICAS: all ranks with the same part of the model, which sum
            the statistics of batch norms.
    """

    operation: str
    nbytes: int
    axis: str = "tensor"


@dataclass(frozen=True)
class Weight:
    """A parameter, or one tensor rank's part of it.

    Attributes:
        name: Name in the whole model.
        numel: Number of elements.
        replicated: True if every tensor rank has the same elements.
        trained: True if it requires a gradient.
        same_as: Name of the same (tied) parameter in an earlier block; empty if there is none.
    """

    name: str
    numel: int
    replicated: bool = True
    trained: bool = True
    same_as: str = ""


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block for one microbatch on one rank, without communication.

    Attributes:
        name: Name in the whole model.
        forward: Seconds of the forward pass (on the last block, with the loss) while all cores of the node, or the
            rank's device, are as busy as in training.
        input: Seconds of the gradient of the block's input.
        weight: Seconds of the gradients of the block's parameters.
        saved_bytes: Bytes that autograd keeps from forward until backward, parameters not counted.
        input_bytes: Bytes of the input, which is all that recompute keeps.
        output_bytes: Bytes of the output, as sent to the next stage.
        working: Largest number of temporary bytes, beside `saved_bytes`, in forward or backward.
        weights: Parameters of the block, in the order of registration.
        forwards: Exchanges in the forward pass.
        backwards: Exchanges in the backward pass.
        later: Further seconds of parameter gradients that are added to existing ones.
        tail: Seconds at the end of the forward pass that recompute does not repeat: backward needs nothing from them.
        hooks: Seconds of Python for recomputing the block.
        products: Seconds that `train.recompute "selective"` saves compared with `true`: those of the operations whose
            outputs it keeps, minus its own Python; may be negative.
        product_bytes: Bytes of these outputs.
        shared_bytes: Bytes of the input that an earlier block keeps, too; `saved_bytes` excludes them.
    """

    name: str
    forward: float
    input: float
    weight: float
    saved_bytes: int
    input_bytes: int
    output_bytes: int
    working: int
    weights: tuple[Weight, ...]
    forwards: tuple[AxisExchange, ...] = ()
    backwards: tuple[AxisExchange, ...] = ()
    later: float = 0.0
    tail: float = 0.0
    hooks: float = 0.0
    products: float = 0.0
    product_bytes: int = 0
    shared_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the forward and the backward pass."""
        return self.forward + self.input + self.weight

    @property
    def numel(self) -> int:
        """Elements of the parameters that no earlier block has."""
        return sum(weight.numel for weight in self.weights if not weight.same_as)

    @property
    def is_unit(self) -> bool:
        """True if it is one of a list of blocks of the model, gathered and recomputed by itself (`shard.flat`)."""
        return self.name.rpartition(".")[2].isdigit()


@dataclass(frozen=True)
class Divided:
    """Division of the model's layers and sequences over ranks, before the model is cut into stages.

    Attributes:
        tensor: Ranks of the tensor axis.
        sequence: If true, activations between divided layers are divided along the sequence.
        whole: Patterns of layers that stay whole.
        slices: Pieces of a sequence that pass through the pipeline one by one.
        synchronized: If true, several ranks compute the statistics of batch norms together.
        axes: The setting parallel.axes.
    """

    tensor: int = 1
    sequence: bool = False
    whole: tuple[str, ...] = ()
    slices: int = 1
    synchronized: bool = False
    axes: tuple[tuple[str, int], ...] = ()


class ModelProfile(ABC):
    """Facts about a model, its precision and its batch that the planner needs.

    Attributes:
        batch: Global batch in samples.
        precision: fp32, bf16 or fp16.
        moments: fp32 numbers kept per parameter element: by the optimizer (Adam: 2), and an average of the weights.
        sample_bytes: Bytes of a sample's input and target.
        listed: True if the model lists its blocks, so that it can be cut into stages.
        divisible: True if the model has a plan that divides its layers over tensor ranks.
        synchronous: True if the model has batch norms, so that all ranks need the same number of microbatches.
        has_units: True if the model has blocks that are recomputed or compiled one by one (see `shard.flat`).
        order: Names of all parameters in the order of registration; flat gradients have the reverse order.
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
        """Return the costs of the blocks, in order, for one microbatch (or a slice of one).

        Args:
            samples: Samples of the microbatch, at least 1.
            divided: Division of layers and sequences.
            threads: Threads that a rank computes with.

        Raises:
            InputError: The model cannot be divided in this way.
        """

    def takes(self, divided: Divided) -> bool:
        """Return True if the model can be divided in this way, as far as that is known without a pass through it."""
        try:
            self.blocks(1, divided)
        except InputError:
            return False
        return True
