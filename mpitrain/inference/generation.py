"""Texts that go on from prompts of any lengths, a batch of them at a time.

The prompts of a batch are read together up to the end of the shortest; from there on each text takes what its prompt
has next, or else what was chosen. So all have one length at any time, and nothing is padded:

    a b c | d e          given to the model: [a, x, p] [b, y, q] [c, z, r], then [d, 1, s] [e, 2, 3] [4, 5, 6] ...
    x y z | 1 2 5
    p q r | s 3 6        (letters are of prompts)

A text that has come to its end leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from mpitrain.inference.placing import LanguageModel
from mpitrain.inference.sampling import Draws, Sampling
from mpitrain.inference.stopping import StopWatch

BATCH = 16  # prompts that go on together
Each = Callable[[int, int], object]  # the number of a prompt, and its next token


@dataclass
class Continuation:
    """How a prompt goes on. tokens: what comes after it. ended: whether it ended by itself, or by a stop string."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Generation:
    """How prompts go on.

    Attributes:
        model: What gives the scores.
        sampling: How a token is chosen.
        count: Tokens to be made for each prompt, at most.
        watch: Makes what looks for stop strings in a text; None: nothing does.
    """

    model: LanguageModel
    sampling: Sampling
    count: int
    watch: Callable[[], StopWatch] | None = None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        draws: Draws,
        numbers: Iterable[int] | None = None,
        each: Each | None = None,
    ) -> list[Continuation]:
        """Let prompts go on. Collective over the ranks that have the model between them.

        Args:
            prompts: The tokens of each, at least one.
            draws: What tokens are drawn by, of these prompts.
            numbers: Of the prompts that are to go on; None: of all.
            each: Called with each token when it is made.

        Returns:
            Of each prompt how it goes on, in their order.
        """
        made = [Continuation() for _ in prompts]
        order = sorted(range(len(prompts)) if numbers is None else numbers, key=lambda number: len(prompts[number]))
        with torch.no_grad():  # in inference mode layers that are divided could not tell tensors apart
            for lo in range(0, len(order), BATCH):
                self._run_batch(order[lo : lo + BATCH], prompts, made, draws, each)
        return made

    def _run_batch(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Sequence[int]],
        made: list[Continuation],
        draws: Draws,
        each: Each | None,
    ) -> None:
        """Let some prompts go on together. numbers: theirs, by length."""
        rows = [number for number in numbers if self.left(prompts[number]) > 0]
        if not rows:
            return
        length = len(prompts[rows[0]])
        watches = {number: self.watch() for number in rows} if self.watch is not None else {}
        self.model.decoder.begin()
        given = torch.tensor([list(prompts[number][:length]) for number in rows])
        while True:
            scores = self.model.decoder.advance(given.to(self.model.device))
            free = [row for row, number in enumerate(rows) if len(prompts[number]) <= length]
            found = None
            if free:
                chosen = None
                if scores is not None:
                    numbers_drawn = draws.next([rows[row] for row in free])
                    own = scores[free, : self.model.vocabulary].float().cpu()
                    if self.sampling.repetition != 1:
                        texts = [[*prompts[rows[row]], *made[rows[row]].tokens] for row in free]
                        own = self.sampling.penalized(own, texts)
                    chosen = self.sampling.choose(own, numbers_drawn)
                found = iter(self.model.settle(chosen, len(free)).tolist())
            following, staying = [], []
            for row, number in enumerate(rows):
                prompt, text = prompts[number], made[number]
                if len(prompt) > length:
                    token = prompt[length]
                else:
                    assert found is not None
                    token = next(found)
                    text.ended = token == self.model.end
                    if not text.ended:
                        text.tokens.append(token)
                        if each is not None:
                            each(number, token)
                        if number in watches:
                            watches[number].add(token)
                            text.ended = watches[number].found
                    if text.ended or len(text.tokens) == self.left(prompt):
                        continue
                staying.append(row)
                following.append(token)
            if not staying:
                return
            if len(staying) < len(rows):
                self.model.decoder.select(staying)
                rows = [rows[row] for row in staying]
            given, length = torch.tensor(following)[:, None], length + 1

    def left(self, prompt: Sequence[int]) -> int:
        """How many tokens there can be after a prompt."""
        longest = self.model.longest
        return self.count if longest is None else min(self.count, longest - len(prompt))
