"""Cases of the kill campaign: every moment at least once, everything else at random from a seed.

The jobs take STEPS steps and save after every second one. A case kills one job, or two in a row, in the same run
folder, and then lets another job go on to the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from kill_points import COMMIT, ENDING, HOWS, PRUNING, REPLACING, RESTORING, SIGNALS, TRAINING, Kill, Moment

STEPS, EVERY = 6, 2
SAVES = STEPS // EVERY
SIDES = ("before", "after")
# after any other moment of a save is before the next one: where the act itself is the last of its kind
LAST = ("save", "own file written", "pointer moved", "old one removed", "a file removed")
SEVERAL = {"a piece written": 3, "a file removed": 3, "ranks agree": 2, "a block read": 2, "all-reduce": 3}  # calls
SNAPSHOT = COMMIT[0]
_Point = tuple[Moment, str]


@dataclass(frozen=True)
class Case:
    """One or two kills, and the job that goes on to the end.

    Attributes:
        ranks: Ranks of the jobs that are killed.
        then: Ranks of the last job.
        damaged: True where the newest checkpoint is damaged after the first kill.
    """

    number: int
    ranks: int
    then: int
    files: str
    background: bool
    zero: int
    kills: tuple[Kill, ...]
    damaged: bool = False

    @property
    def dropout(self) -> float:
        """Dropout rate: 0 where numbers of ranks or ZeRO stages are compared, because each rank draws its own."""
        return 0.1 if self.ranks == self.then == 2 and not self.zero else 0.0

    @property
    def label(self) -> str:
        kill = self.kills[-1]
        return f"{self.number}-{kill.side}-{kill.moment}-{kill.how}".replace(" ", "-")

    def __str__(self) -> str:
        saves = f"{'background' if self.background else 'foreground'} saves, a file per {self.files}"
        kills = "; then ".join(map(str, self.kills))
        damage = "; the newest checkpoint is damaged in between" if self.damaged else ""
        return f"case {self.number}: {self.ranks} ranks, then {self.then}, zero {self.zero}, {saves}; {kills}{damage}"


def cases(count: int, seed: int, *, both_sides: bool) -> list[Case]:
    """Return the first `count` cases of a seed.

    both_sides: Kill before and after every moment of a save, even where "after" means just before the next moment.
    """
    return list(itertools.islice(_cases(Random(seed), both_sides), count))


def _cases(chance: Random, both_sides: bool) -> Iterator[Case]:
    firsts = itertools.cycle(_shuffled(chance, _firsts(chance, both_sides)))
    seconds = itertools.cycle(_shuffled(chance, _seconds(chance)))
    waiting: list[_Point] = []
    for number in itertools.count():
        if number % 2:
            waiting.append(next(seconds))
        if waiting and waiting[0][0] in REPLACING:
            moment = chance.choice(TRAINING)
            yield _case(chance, number, (moment, _side(chance, moment)), waiting.pop(0))
            continue
        first = next(firsts)
        second: _Point | None = None
        if first[0].name == "old one hidden" and first[1] == "before":
            second = (first[0], chance.choice(SIDES))  # the next save has two to hide
        elif waiting and first[0].name != "end":
            second = waiting.pop(0)
        yield _case(chance, number, first, second)


def _firsts(chance: Random, both_sides: bool) -> list[_Point]:
    saving = [(moment, "before") for moment in (*COMMIT, *PRUNING)]
    saving += [(moment, "after") for moment in (*COMMIT, *PRUNING) if both_sides or moment.name in LAST]
    return [*saving, *((moment, _side(chance, moment)) for moment in (*TRAINING, *ENDING))]


def _seconds(chance: Random) -> list[_Point]:
    """Return points for a second kill: while restoring, or in the first step or save after it."""
    restoring = [(moment, _side(chance, moment)) for moment in RESTORING]
    training = [(moment, _side(chance, moment)) for moment in chance.sample(TRAINING, 3)]
    saving = [(moment, _side(chance, moment)) for moment in chance.sample((*COMMIT[1:], *PRUNING), 3)]
    return [*restoring, *training, *saving, *((moment, side) for moment in REPLACING for side in SIDES)]


def _shuffled(chance: Random, points: list[_Point]) -> list[_Point]:
    return chance.sample(points, len(points))


def _side(chance: Random, moment: Moment) -> str:
    return "inside" if moment.name == "all-reduce" else chance.choice(SIDES)


def _case(chance: Random, number: int, first: _Point, second: _Point | None) -> Case:
    damaged = second is not None and second[0] in REPLACING
    fewest = max(moment.ranks for moment, _ in (first, second or first))
    ranks = max(fewest, chance.choices((1, 2, 3, 4), (18, 58, 18, 6))[0])
    then = ranks if chance.random() < 0.7 else chance.choice([n for n in (1, 2, 3) if n != ranks])
    files = chance.choice(("rank", "node"))
    background = first[0] is SNAPSHOT or (not damaged and chance.random() < 0.5)
    zero = 2 if ranks == 2 and chance.random() < 0.3 else 0
    times = [_first_round(chance, first[0], background, damaged, second is not None)]
    kills = [_kill(chance, first, times[0], 1, ranks, files)]
    if second is not None:
        later = 2 if second[0] == first[0] and second[0].name == "old one hidden" else 1
        kills.append(_kill(chance, second, 1, later, ranks, files))
    return Case(number, ranks, then, files, background, zero, tuple(kills), damaged)


def _first_round(chance: Random, moment: Moment, background: bool, damaged: bool, again: bool) -> int:
    """Return the round of the first kill. again: leave a checkpoint to resume from, and steps to do."""
    if moment in TRAINING:
        # two saves are there then where one is to be damaged; one in the background, when the next begins
        earliest = 5 if damaged or background else 3
        return chance.randint(earliest if again else 1, STEPS)
    if moment in (*COMMIT, *PRUNING):
        last = SAVES - 1 if again or moment is SNAPSHOT else SAVES  # the last one of a job is in the foreground
        return chance.randint(2 if again or moment in PRUNING else 1, last)
    return 1


def _kill(chance: Random, point: _Point, when: int, count: int, ranks: int, files: str) -> Kill:
    moment, side = point
    first = moment.who == "first" or (moment.who == "owner" and files == "node")
    rank = 0 if first else chance.randrange(ranks)
    if moment.name == "evaluation":
        count = 2  # at the end
    count = max(count, chance.randint(1, SEVERAL.get(moment.name, 1)))
    victim = chance.randrange(ranks) if first and chance.random() < 0.4 else rank
    how = chance.choice(SIGNALS if victim != rank else HOWS)
    return Kill(moment.name, side, when, count, rank, victim, how)
