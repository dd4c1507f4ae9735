"""Going on with a parameter server when workers die: the servers have all there is, and keep it.

No copies are made. Those that are left make a smaller world with the same servers, whose shares, optimizer states and
count of what was applied the new engine takes over; the parts that a dead worker had are given to others. What it was
pushing may count on some servers and not on others. A server that dies takes its shares along: then the job ends, and
is to be started again from the last checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitrain.loose.letters import Remembered
from mpitrain.trainer.callback import Restored, Step
from mpitrain.trainer.elastic import Survivors, TooFewLeft
from mpitrain.trainer.modes.served_engine import ServedEngine

if TYPE_CHECKING:
    from mpitrain.trainer.modes.served import Served
    from mpitrain.trainer.trainer import Trainer


@dataclass(frozen=True)
class Left:
    """What a rank keeps of the time before ranks died.

    Attributes:
        engine: With its memory.
        step: Which all ranks know to be complete.
        values: What is kept with the model, of that step.
        remembered: What was applied.
    """

    engine: ServedEngine
    step: int
    values: dict[str, Any]
    remembered: Remembered


class ServedSurvivors(Survivors):
    """What of a run with servers outlives the death of workers.

    Args:
        trainer: Whose run it is.
        strategy: Its own.
    """

    def __init__(self, trainer: Trainer, strategy: Served) -> None:
        super().__init__(trainer)
        self._strategy = strategy
        self._left: Left | None = None
        self._servers = set(strategy.roles.servers)  # numbers in the first world
        self._completed = 0  # steps that were complete when ranks died

    def copy(self, trainer: Trainer) -> None:
        """Nothing is to be copied."""

    def on_update(self, trainer: Trainer, step: Step) -> None:
        """Nothing is to be noted: the servers know."""

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        self._step = max(self._step, self._completed)

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        if step.number > self._completed:  # others are told once more, to those who did not know them
            super().on_step_end(trainer, step)

    def close_ranks(self) -> None:
        self._leave_out_the_dead(None)  # the servers are to stay the last
        dead = sorted(self._servers & set(self._lost))
        if dead:
            which = f"rank {dead[0]}, a server," if len(dead) == 1 else f"ranks {', '.join(map(str, dead))}, servers,"
            raise TooFewLeft(
                f"{which} died with a part of the parameters; start the job again, it goes on from the last checkpoint",
                agreed=True,
            )
        if self.everyone.size == len(self._servers):
            raise TooFewLeft("all workers died; start the job again, it goes on from the last checkpoint", agreed=True)
        self._take_stock()
        self._trainer.let_go()
        self._begin_anew()
        self._trainer.world = self.everyone
        self._trainer.folder.move_to(self.everyone)

    def _take_stock(self) -> None:
        trainer, session = self._trainer, self._strategy.session
        if session is None:
            return
        own = session.remembered  # None but on the server that gives out samples
        was = trainer.world.rank
        told = self.everyone.all_gather_object([was, session.known, own.to_json() if own is not None else None])
        remembered = Remembered.from_json(next(found for _, _, found in told if found is not None))
        step = min(int(known) for _, known, _ in told[: -len(self._servers)])  # servers know nothing before they meet
        if told[0][0] != 0 and remembered.records:  # nobody knows what the first rank has recorded
            step = int(remembered.records[0].step) - 1
        values = trainer.state() | {"position": session.position(step)}
        self._left, self._completed = Left(session.engine, step, values, remembered), remembered.completed

    def restore(self, trainer: Trainer) -> Restored | None:
        left, self._store = self._left, trainer.store
        if left is None:
            return None
        assert isinstance(trainer.engine, ServedEngine)
        trainer.engine.take_over(left.engine)
        self._strategy.remembered = left.remembered
        self._left = None
        return Restored(left.step, left.values)
