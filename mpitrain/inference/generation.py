"""Texts that go on from prompts of any lengths, a batch of them at a time.

The prompts of a batch are read together up to the end of the shortest; from there on each text takes what its prompt
has next, or else what was chosen. So all have one length at any time, and nothing is padded:

    a b c | d e          given to the model: [a, x, p] [b, y, q] [c, z, r], then [d, 1, s] [e, 2, 3] [4, 5, 6] ...
    x y z | 1 2 5
    p q r | s 3 6        (letters are of prompts)

A text that has come to its end leaves the batch. The next token is chosen from its scores, the likeliest or one drawn:

    scores of tokens that the text has already are divided by the repetition penalty, or multiplied where they are
    negative (Keskar et al. 2019, CTRL)
    probabilities = softmax(scores / temperature), of which there stay
        top_k     the k likeliest tokens (Fan et al. 2018, Hierarchical neural story generation)
        top_p     then the fewest likeliest ones that together have p of what is left (nucleus sampling, Holtzman et al.
                  2020, The curious case of neural text degeneration)
        min_p     of these the ones at least min_p times as likely as the likeliest (Nguyen et al. 2025, min-p sampling)

A token is drawn by one number from 0 to 1, of which every prompt has a sequence of its own: it follows from the seed
and the prompt alone, so that a prompt goes on alike by itself and beside others.

A text may end at a stop string, which is found as tokens come and is no part of it. What may be its beginning is held
back until it is certain:

    stop "\\n\\n"    tokens give   "a" "b\\n" "c" "\\n" "\\nd"
                  passed on     "a" "b"   "\\nc"  ""   ""     then the text has ended
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mpitrain.errors import refusal
from mpitrain.inference.placing import LanguageModel
from mpitrain.inference.prompts import TextDecoder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: What scores are divided by; 0: the likeliest token.
        top_k: So many of the likeliest tokens are drawn from; 0: all.
        top_p: Of these as many as have this probability together; 1: all.
        min_p: Least probability of a token that is drawn, as a share of the likeliest one's; 0: any.
        repetition: Penalty of tokens that the text has already, prompt included; 1: none.

    Raises:
        InputError: One of them is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise refusal(f"--temperature {self.temperature:g}: give 0 for the likeliest token, or a number above it")
        if self.top_k < 0:
            raise refusal(f"--top-k {self.top_k}: give how many tokens are drawn from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise refusal(f"--top-p {self.top_p:g}: give a probability above 0 and up to 1")
        if not 0 <= self.min_p <= 1:
            raise refusal(f"--min-p {self.min_p:g}: give a share of the likeliest token's probability, from 0 to 1")
        if not (math.isfinite(self.repetition) and self.repetition > 0):
            raise refusal(f"--repetition-penalty {self.repetition:g}: give 1 for none, or a number above it")

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """What each token is drawn with.

        Args:
            scores: [rows, vocabulary].

        Returns:
            [rows, vocabulary], fp64.
        """
        wide = scores.double()
        if self.temperature == 0:
            return torch.zeros_like(wide).scatter_(1, wide.argmax(1, keepdim=True), 1.0)
        whole = torch.softmax(wide / self.temperature, 1)
        if self.top_k == 0 and self.top_p == 1 and self.min_p == 0:
            return whole
        likely, tokens = whole.sort(dim=1, descending=True, stable=True)
        if self.top_k:
            likely[:, self.top_k :] = 0
        likely /= likely.sum(1, keepdim=True)
        before = likely.cumsum(1) - likely  # what the likelier ones have together
        likely[before >= self.top_p] = 0
        likely[likely < self.min_p * likely[:, :1]] = 0
        kept = torch.zeros_like(whole).scatter_(1, tokens, likely)
        return kept / kept.sum(1, keepdim=True)

    def penalized(self, scores: torch.Tensor, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the scores with those of tokens that a row's text has already made less.

        Args:
            scores: [rows, vocabulary].
            texts: Tokens of each row's prompt and of what came after it.
        """
        scores = scores.clone()
        for row, text in zip(scores, texts, strict=True):
            seen = torch.tensor(sorted(set(text)), device=scores.device)
            old = row[seen]
            row[seen] = torch.where(old < 0, old * self.repetition, old / self.repetition)
        return scores

    def choose(self, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The next tokens, int64 [rows]. scores: [rows, vocabulary]. numbers: [rows], fp64, from 0 to below 1."""
        if self.temperature == 0:
            return scores.argmax(1)
        reached = self.probabilities(scores).cumsum(1)
        wanted = numbers.to(reached.device)[:, None] * reached[:, -1:]
        return (reached <= wanted).sum(1).clamp_(max=scores.shape[1] - 1)


class Draws:
    """The numbers from 0 to 1 by which tokens are drawn, for each prompt its own.

    Args:
        seed: Of all of them.
        prompts: The tokens of each prompt; one that comes again gets another sequence.
    """

    def __init__(self, seed: int, prompts: Sequence[Sequence[int]]) -> None:
        seen: Counter[tuple[int, ...]] = Counter()
        self._generators = []
        for prompt in map(tuple, prompts):
            named = f"{seed} {seen[prompt]} {' '.join(map(str, prompt))}".encode()
            number = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little")
            self._generators.append(torch.Generator().manual_seed(number))
            seen[prompt] += 1

    def next(self, prompts: Sequence[int]) -> torch.Tensor:
        """The next number of each of some prompts, fp64. prompts: their places in the list."""
        drawn = [torch.rand((), generator=self._generators[number], dtype=torch.float64) for number in prompts]
        return torch.stack(drawn) if drawn else torch.empty(0, dtype=torch.float64)


class StopWatch(TextDecoder):
    """A decoder of one continuation that looks for stop strings.

    Args:
        decoder: Makes text of the tokens.
        stops: Stop strings; none: all text is passed on at once.

    Attributes:
        found: Whether a stop string has come.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops = decoder, stops
        self._held = ""
        self.found = False

    def add(self, token: int) -> str:
        """Return the text that certainly comes before any stop string."""
        return self._passed(self._decoder.add(token))

    def finish(self) -> str:
        """Return what was held back, if no stop string came of it."""
        text = self._passed(self._decoder.finish())
        return text if self.found else text + self._held

    def _passed(self, piece: str) -> str:
        if self.found:
            return ""
        text = self._held + piece
        places = [at for at in map(text.find, self._stops) if at >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        begun = (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        certain = len(text) - max(begun, default=0)
        self._held = text[certain:]
        return text[:certain]


BATCH = 16  # prompts that go on together
Prompts = Sequence[Sequence[int]]  # the tokens of each
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
        self, prompts: Prompts, draws: Draws, numbers: Iterable[int] | None = None, each: Each | None = None
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
        self, numbers: Sequence[int], prompts: Prompts, made: list[Continuation], draws: Draws, each: Each | None
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
            found: Iterator[int] = iter(())
            if free:
                chosen = None
                if scores is not None:
                    own = scores[free, : self.model.vocabulary].float().cpu()
                    if self.sampling.repetition != 1:
                        texts = [[*prompts[rows[row]], *made[rows[row]].tokens] for row in free]
                        own = self.sampling.penalized(own, texts)
                    chosen = self.sampling.choose(own, draws.next([rows[row] for row in free]))
                found = iter(self.model.settle(chosen, len(free)).tolist())
            following, staying = [], []
            for row, number in enumerate(rows):
                prompt, text = prompts[number], made[number]
                if len(prompt) > length:
                    token = prompt[length]
                else:
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
