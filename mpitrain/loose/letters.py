"""What workers and servers write to each other: words in small messages, whose first says what they are.

    to a server                                                   to a worker, or to any rank
    CLAIM   limit, stop      give me the next part                 GRANT    step, part         work on this one
    PULL    least, final     send the parameters                   MEET     limit              there are no more
    PUSHED  step, part, b    bucket b of gradients is there        BUCKET   b, completed, progress   it is there
    UNUSED  step, part       parameters that the part left alone
    COMMIT  step, part, ...  apply what I pushed                   RECORD   step, loss, ...    a step is complete
    SQUARES step, sum        of my shares of the gradients         FAILED                   this rank's server did
    HERE                     I have what I need to meet    TOGETHER                 all workers have
    END                      no more will come

Gradients and parameters travel with PUSHED and BUCKET where the ranks share no memory (see `mpitrain.loose.memory`).
UNUSED, which is left out where there are no such parameters, comes with a flag for each.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class LetterKind(IntEnum):
    """The first word of a letter."""

    CLAIM = 1
    PULL = 2
    PUSHED = 3
    COMMIT = 4
    SQUARES = 5
    HERE = 6
    END = 7
    UNUSED = 8
    GRANT = 11
    MEET = 12
    BUCKET = 13
    RECORD = 14
    TOGETHER = 15
    FAILED = 16


class Commit(NamedTuple):
    """A worker has pushed all gradients of a part.

    Attributes:
        step: Of the part.
        part: Its number.
        lr: The learning rate of the step.
        weight: The part of the batch's samples that it has.
        factor: What the gradients are to be multiplied by: for clipping; 0 where they are not finite.
        loss: Its contribution to the mean loss of the step's batch.
        norm: The 2-norm of the mean gradient of its samples; 0 where the servers find that of the whole batch.
        progress: What the server had applied when it sent the parameters, in steps.
        ahead: Steps that the worker was ahead of the slowest when it got the parameters.
    """

    step: float
    part: float
    lr: float
    weight: float
    factor: float
    loss: float
    norm: float
    progress: float
    ahead: float


class StepRecord(NamedTuple):
    """What becomes known of a step when it is complete.

    Attributes:
        step: From 1.
        loss: The mean over its batch.
        norm: Of the batch's gradients where the step is bulk-synchronous, else the root of the mean square of the
            norms of its parts.
        skipped: 1 where nothing was updated, because a gradient is not finite.
        staleness_mean: Of its parts: what was applied between the sending of the parameters and the gradient's own
            update, in steps.
        staleness_max: The largest of these.
        ahead_max: The most steps that a worker was ahead of the slowest.
        between_nodes: Bytes of gradients and parameters that went between nodes for it.
        seconds: Since the step before was complete; of several that become complete together, each has its part.
    """

    step: float
    loss: float
    norm: float
    skipped: float
    staleness_mean: float
    staleness_max: float
    ahead_max: float
    between_nodes: float
    seconds: float
