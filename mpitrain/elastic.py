"""Going on without ranks that died: copies of the state in other ranks' memory, and training entered again.

At the end of every copied step each rank puts its parts of a checkpoint into host memory, and a partner on another
node keeps them too:

    rank 0   own parts | rank 2's         ranks 0 and 1 on node A, 2 and 3 on node B; two steps' copies are kept, so
    rank 1   own parts | rank 3's         that one is whole everywhere while the next is being made
    rank 2   own parts | rank 0's
    rank 3   own parts | rank 1's

When ranks die, those that are left make a smaller world and read the newest copy that they hold whole between them as
they would read a checkpoint written by other ranks; where a rank died with its partner, the last checkpoint itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.comm import Communicator
from mpitrain.comm.elastic import ranks_died, shrink
from mpitrain.comm.faults import say
from mpitrain.config import Config
from mpitrain.copies import Copies
from mpitrain.errors import EXIT_REQUEUE, InputError, MpitrainError

if TYPE_CHECKING:
    from mpitrain.checkpoint import Store
    from mpitrain.run import Run
    from mpitrain.shard.engine import Engine


class TooFewLeft(MpitrainError):
    """The ranks that are left cannot go on by themselves; the job is to be started again."""

    exit_code = EXIT_REQUEUE


class Survivors:
    """What of a run outlives the death of ranks."""

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config, self.world = config, world
        self._copies = Copies()
        self._store: Store | None = None
        self.saved = False  # whether this job has written a checkpoint
        self.missing = False  # whether ranks died, and the others have not yet come together
        self._lost: list[int] = []
        self._since = 0.0  # time.monotonic() when ranks were missed

    @property
    def fewer(self) -> bool:
        """Whether ranks were lost, and training does not go on yet."""
        return bool(self._lost)

    def copy(self, engine: Engine, step: int, position: int) -> None:
        """Keep the state at the end of a step. Collective."""
        self._copies.take(self.world, engine, step, {"position": position})

    def restore(self, engine: Engine, store: Store) -> tuple[int, int] | None:
        """Put what the copies hold into the engine; returns (steps done, samples seen). Collective.

        None where there are none, or not enough. store: the run's checkpoints from now on.
        """
        self._store = store
        manifest = self._copies.restore(self.world, engine)
        return None if manifest is None else (manifest.step, manifest.values["position"])

    def going_on(self, step: int) -> None:
        """Say that training goes on, if ranks were lost."""
        if self._lost and self.world.rank == 0:
            which = "rank" if len(self._lost) == 1 else "ranks"
            left = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
            say(
                f"mpitrain: {which} {', '.join(map(str, sorted(self._lost)))} died; going on from step {step} with "
                f"{left}, after {time.monotonic() - self._since:.1f} s"
            )
        self._lost = []

    def missed(self, error: BaseException) -> bool:
        """Whether an error came of the death of ranks."""
        if not ranks_died(self.world, error):
            return False
        if not self.fewer and not self.missing:
            self._since = time.monotonic()
        self.missing = True
        return True

    def close_ranks(self, run: Run) -> None:
        """Go over to the world of those that are left. Collective over them."""
        self.world, loss = shrink(self.world)
        self.missing = False
        self._lost += loss.lost
        left = f"{self.world.size} of {self.world.size + len(loss.lost)} ranks are left"
        run.log.info("lost %s; %s, this one is rank %d", list(loss.lost), left, self.world.rank)
        if not loss.is_main_part:
            raise TooFewLeft(
                f"{left}, cut off from ranks {', '.join(map(str, loss.parted))}, which may go on; start the job again "
                "when their nodes are back",
                agreed=True,
            )
        if self._store is not None:
            self._store.abandon()
            self._store = None
        run.move_to(self.world)
        resume = self.config.checkpoint.resume
        if resume == "never" or self.saved:  # what was there before "never" has been set aside
            resume = "auto"
        self.config = self.config.model_copy(
            update={
                "parallel": self.config.parallel.model_copy(update={"data": "auto"}),
                "checkpoint": self.config.checkpoint.model_copy(update={"resume": resume}),
            }
        )


def keep_training(config: Config, world: Communicator, run: Run, train: Callable[[Survivors], int]) -> int:
    """Train, and when ranks die train again with those that are left. Returns train's value."""
    survivors = Survivors(config, world)
    while True:
        try:
            if survivors.missing:
                survivors.close_ranks(run)
            return train(survivors)
        except Exception as error:
            if not survivors.missed(error):
                if survivors.fewer and isinstance(error, InputError) and error.agreed:
                    number = survivors.world.size
                    raise TooFewLeft(f"{number} ranks are left, which do not fit: {error}", agreed=True) from error
                raise
            run.log.info("ranks died: %s", error)
