"""Microbatches through the stages of a pipeline: when its ranks are done and what they hold, for many costs.

As `pipe.simulate` simulates. Of a built-in schedule with more than 8 microbatches a rank of the pipeline, two shorter
ones are simulated, which differ by as many microbatches as ranks, and the difference is added for each further so many:
by then every round takes as long as the one before it. (With stages of very different lengths that takes a little
longer to come; the error stays below 1 %.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from mpitrain.pipe.schedule import Schedule
from mpitrain.pipe.schedules import SCHEDULES, make_schedule
from mpitrain.pipe.simulate import Costs, PreparedSchedule

ROUNDS = 8  # microbatches for each rank of the pipeline from which on rounds take equally long
_FULL = 4  # the same from which on ranks hold as many as ever, or as many more in each round


class Flow:
    """A schedule's numbers of microbatches, whole or extrapolated. The arguments are those of `make_schedule`.

    Attributes:
        microbatches: That the steps of the whole schedule count (slices of them, where there are slices).
        held: Bytes of activations that each rank holds at most, of those that each stage keeps of a microbatch.
    """

    def __init__(self, name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> None:
        self._count, self._ranks, self._built_in = microbatches, ranks, name in SCHEDULES
        self.microbatches = microbatches * slices
        self._prepared: Callable[[int], PreparedSchedule] = lambda count: _prepared(name, ranks, count, chunks, slices)
        self.held = lru_cache(maxsize=64)(lambda kept: self._extended(_FULL, lambda prepared: prepared.held(kept)))

    @property
    def shape(self) -> Schedule:
        """A schedule with the same ranks and stages, of as many or fewer microbatches."""
        return self._rounds(_FULL)[0].schedule

    def ends(self, costs: Costs) -> list[float]:
        """When each rank of the pipeline is done with its last step, in the unit of the costs.

        Raises:
            ScheduleError: Steps wait for each other in a circle.
        """
        return self._extended(ROUNDS, lambda prepared: prepared.ends(costs))

    def ends_on_shared_cores(
        self, costs: Costs, nodes: Sequence[int], cores: float, message: Callable[[int, int], float]
    ) -> list[float]:
        """Return when each rank is done, as `PreparedSchedule.ends_on_shared_cores` says; nothing is extrapolated."""
        return self._prepared(self._count).ends_on_shared_cores(costs, nodes, cores, message)

    def _rounds(self, most: int) -> tuple[PreparedSchedule, PreparedSchedule, int]:
        """The schedule with fewer microbatches, with a round more, and how many more rounds the whole one has."""
        few, ranks = self._count, self._ranks
        if self._built_in and few > most * ranks:
            few = (most - 1) * ranks + few % ranks
        more = (self._count - few) // ranks
        return self._prepared(few), self._prepared(few + (more > 0) * ranks), more

    def _extended(self, most: int, of: Callable[[PreparedSchedule], list[float]]) -> list[float]:
        short, long, more = self._rounds(most)
        return [a + (b - a) * more for a, b in zip(of(short), of(long), strict=True)] if more else of(short)


@lru_cache(maxsize=512)
def _prepared(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> PreparedSchedule:
    return PreparedSchedule(make_schedule(name, ranks, microbatches, chunks, slices))


def estimate(
    name: str, ranks: int, count: int, chunks: int, spread: Sequence[float], slowest: float, message: float
) -> float:
    """About the end of a schedule, in closed form: its microbatches on the slowest rank, and what fills and drains it.

    With equal stages and no messages it is what `Flow.ends` simulates, as far as `pipe.schedules` says how long its
    ranks are idle; a schedule of the user's is taken for 1f1b.

    Args:
        name: The schedule.
        ranks: Of the pipeline.
        count: Microbatches.
        chunks: Stages of a rank.
        spread: Seconds of a microbatch's forward, input and weight passes through a rank, if all ranks were equal.
        slowest: Seconds of a microbatch on the slowest rank.
        message: Seconds of a message between two stages.
    """
    forward, input_, weight = spread
    short = max(0, ranks - count)  # microbatches that a rank lacks to be busy while the others fill
    idle, sent = (ranks - 1) * (forward + input_ + weight), 2 * (ranks - 1)
    if name == "interleaved":
        idle = (idle + short * (forward + input_ + weight) * (chunks - 1)) / chunks
        sent = 2 * (ranks * chunks - 1)
    elif name == "zero-bubble" and chunks == 1:
        idle, sent = (ranks - 1) * max(0.0, forward + input_ - weight) + short * weight, 4 * (ranks - 1)
    elif name == "zero-bubble":
        idle = (ranks - 1) * max(spread) + (short + max(0, 2 * ranks - 1 - count)) * weight
        idle, sent = idle / chunks, 2 * ranks * chunks
    elif name != "gpipe":
        sent += 2 * (ranks - 1) * count // ranks  # each rank sends and waits in turns
    return count * slowest + idle + sent * message
