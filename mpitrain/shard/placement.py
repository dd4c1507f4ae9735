"""Which of parameters, gradients and optimizer states every data-parallel rank has whole, and which it shares out.

    stage        parameters   gradients    optimizer states     bytes per parameter and rank, 16-bit training
    0  DDP       replicated   replicated   replicated           16
    1  ZeRO-1    replicated   replicated   sharded              4 + 12/N
    2  ZeRO-2    replicated   sharded      sharded              2 + 14/N
    3  ZeRO-3    sharded      sharded      sharded              16/N

The bytes are those of Rajbhandari et al. 2020 (ZeRO, section 3): 2 for a 16-bit parameter, 2 for its gradient and 12
for the optimizer's fp32 copy and its two moments. In fp32 training the copy is the parameter itself: 4, 4 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass

SCRATCH = 16 << 20  # elements of fp32 gradients made at a time in 16-bit training


@dataclass(frozen=True)
class ZeroStage:
    """Whether parameters, gradients and optimizer states are sharded (True) or replicated."""

    parameters: bool
    gradients: bool
    states: bool


STAGES = (
    ZeroStage(False, False, False),
    ZeroStage(False, False, True),
    ZeroStage(False, True, True),
    ZeroStage(True, True, True),
)


@dataclass(frozen=True)
class Account:
    """Bytes on a rank, by category.

    Attributes:
        parameters: In the precision of the forward pass.
        gradients: In the same precision.
        states: The optimizer's, its fp32 copy of 16-bit parameters included.
    """

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return self.parameters + self.gradients + self.states


def formula(stage: ZeroStage, ranks: int, numel: int, itemsize: int, moments: int, *, copied: bool = False) -> Account:
    """What training takes on each rank, without padding.

    Args:
        stage: Of ZeRO.
        ranks: The data-parallel ranks.
        numel: Trained parameters.
        itemsize: Bytes of a parameter in the forward pass.
        moments: fp32 numbers that the optimizer keeps per parameter (Adam: 2).
        copied: The optimizer works on a copy of fp32 parameters too, as where the host updates those of a device.
    """
    master = 4 if itemsize < 4 or copied else 0

    def per_rank(nbytes: int, sharded: bool) -> float:
        return nbytes * numel / (ranks if sharded else 1)

    return Account(
        per_rank(itemsize, stage.parameters),
        per_rank(itemsize, stage.gradients),
        per_rank(master + 4 * moments, stage.states),
    )
