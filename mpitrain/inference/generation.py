"""Text generation from prompts of any lengths, in batches.

The prompts of a batch are processed together up to the end of the shortest. After that, each text continues with the
next token of its prompt, or with a chosen token once its prompt has ended. All texts therefore have equal length at any
time, and nothing is padded (letters are tokens of prompts, digits are chosen tokens):

    a b c | d e          given to the model: [a, x, p] [b, y, q] [c, z, r], then [d, 1, s] [e, 2, 3] [4, 5, 6] ...
    x y z | 1 2 5
    p q r | s 3 6

A text that has ended leaves the batch. The next token is chosen from its scores, greedily or by sampling:

    scores of tokens that the text already has are divided by the repetition penalty, or multiplied by it if they are
    negative (Keskar et al. 2019, CTRL)
    probabilities = softmax(scores / temperature), of which the following stay
        top_k     the k likeliest tokens (Fan et al. 2018, Hierarchical neural story generation)
        top_p     then the fewest likeliest tokens whose total probability is at least p (nucleus sampling, Holtzman et
                  al. 2020, The curious case of neural text degeneration)
        min_p     then the tokens at least min_p times as likely as the likeliest (Nguyen et al. 2025, min-p sampling)

Each token is drawn with one random number from 0 to 1. Every prompt has its own random sequence, which depends only on
the seed and the prompt. A prompt therefore continues in the same way alone and next to other prompts.

A text may end at a stop string, which is searched for as tokens arrive and is not part of the text. Text that may be
the beginning of a stop string is withheld until this is certain:

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
    """Rule for choosing the next token.

    Attributes:
        temperature: Divisor of the scores; 0 to take the likeliest token.
        top_k: Number of likeliest tokens to draw from; 0 for all.
        top_p: Total probability of the likeliest tokens to draw from; 1 for all.
        min_p: Smallest probability of a token, as a fraction of the likeliest token's; 0 for none.
        repetition: Penalty of tokens that the text already has, prompt included; 1 for none.

    Raises:
        InputError: A value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise refusal(f"--temperature {self.temperature:g}: use 0 for the likeliest token, or a larger number")
        if self.top_k < 0:
            raise refusal(f"--top-k {self.top_k}: use the number of tokens to draw from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise refusal(f"--top-p {self.top_p:g}: use a probability above 0 and up to 1")
        if not 0 <= self.min_p <= 1:
            raise refusal(f"--min-p {self.min_p:g}: use a fraction of the likeliest token's probability, from 0 to 1")
        if not (math.isfinite(self.repetition) and self.repetition > 0):
            raise refusal(f"--repetition-penalty {self.repetition:g}: use 1 for none, or a larger number")

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the probability with which each token is drawn.

        Args:
            scores: Scores of the tokens, [rows, vocabulary].

        Returns:
            Probabilities, [rows, vocabulary], fp64.
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
        before = likely.cumsum(1) - likely  # total probability of the likelier tokens
        likely[before >= self.top_p] = 0
        likely[likely < self.min_p * likely[:, :1]] = 0
        remaining = torch.zeros_like(whole).scatter_(1, tokens, likely)
        return remaining / remaining.sum(1, keepdim=True)

    def penalize(self, scores: torch.Tensor, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the scores, lowered for tokens that a row's text already has.

        Args:
            scores: Scores of the tokens, [rows, vocabulary].
            texts: Tokens of each row's prompt and continuation.
        """
        scores = scores.clone()
        for row, text in zip(scores, texts, strict=True):
            seen = torch.tensor(sorted(set(text)), device=scores.device)
            old = row[seen]
            row[seen] = torch.where(old < 0, old * self.repetition, old / self.repetition)
        return scores

    def choose(self, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row, int64 [rows].

        Args:
            scores: Scores of the tokens, [rows, vocabulary].
            numbers: Random numbers in [0, 1), fp64 [rows]; not used at temperature 0.
        """
        if self.temperature == 0:
            return scores.argmax(1)
        reached = self.probabilities(scores).cumsum(1)
        targets = numbers.to(reached.device)[:, None] * reached[:, -1:]
        return (reached <= targets).sum(1).clamp_(max=scores.shape[1] - 1)


class Draws:
    """Random sequences by which tokens are drawn, one for each prompt.

    Args:
        seed: Seed of all sequences.
        prompts: Tokens of each prompt; a repeated prompt gets a different sequence.
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
        """Return the next random number of each of these prompts, fp64, in [0, 1).

        Args:
            prompts: Numbers of the prompts in the list.
        """
        drawn = [torch.rand((), generator=self._generators[number], dtype=torch.float64) for number in prompts]
        return torch.stack(drawn) if drawn else torch.empty(0, dtype=torch.float64)


class StopSearch(TextDecoder):
    """Decoder of one continuation that searches for stop strings.

    Args:
        decoder: Decoder from tokens to text.
        stops: Stop strings; if empty, all text is passed on at once.

    Attributes:
        stopped: True once a stop string has been found.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops = decoder, stops
        self._withheld = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Return the new text that certainly precedes any stop string."""
        return self._release(self._decoder.add(token))

    def finish(self) -> str:
        """Return the withheld text, unless a stop string was found."""
        text = self._release(self._decoder.finish())
        return text if self.stopped else text + self._withheld

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._withheld + piece
        places = [at for at in map(text.find, self._stops) if at >= 0]
        if places:
            self.stopped, self._withheld = True, ""
            return text[: min(places)]
        begun = (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        certain = len(text) - max(begun, default=0)
        self._withheld = text[certain:]
        return text[:certain]


BATCH = 16  # prompts continued together
Prompts = Sequence[Sequence[int]]  # tokens of each prompt
Each = Callable[[int, int], object]  # called with the number of a prompt and its next token


@dataclass
class Continuation:
    """Continuation of a prompt.

    Attributes:
        tokens: Tokens generated after the prompt.
        ended: True if it ended with the end token or a stop string, False if it reached the largest length.
    """

    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Generation:
    """Generator of continuations.

    Attributes:
        model: Model that computes the scores.
        sampling: Rule for choosing the next token.
        count: Largest number of tokens to generate for each prompt.
        stop_search: Function that creates the search for stop strings in one text; None for no search.
    """

    model: LanguageModel
    sampling: Sampling
    count: int
    stop_search: Callable[[], StopSearch] | None = None

    def run(
        self, prompts: Prompts, draws: Draws, numbers: Iterable[int] | None = None, each: Each | None = None
    ) -> list[Continuation]:
        """Continue prompts. Collective over the ranks that share the model.

        Args:
            prompts: Tokens of each prompt, at least one.
            draws: Random sequences of these prompts.
            numbers: Numbers of the prompts to continue; None for all.
            each: Function called with (number of the prompt, token) for each generated token; None for none.

        Returns:
            The continuation of each prompt, in the order of `prompts`.
        """
        continuations = [Continuation() for _ in prompts]
        order = sorted(range(len(prompts)) if numbers is None else numbers, key=lambda number: len(prompts[number]))
        with torch.no_grad():  # not inference mode, in which divided layers cannot recognise tensors
            for lo in range(0, len(order), BATCH):
                self._run_batch(order[lo : lo + BATCH], prompts, continuations, draws, each)
        return continuations

    def _run_batch(
        self,
        numbers: Sequence[int],
        prompts: Prompts,
        continuations: list[Continuation],
        draws: Draws,
        each: Each | None,
    ) -> None:
        """Continue some prompts together. numbers: numbers of the prompts, sorted by length."""
        rows = [number for number in numbers if self.left(prompts[number]) > 0]
        if not rows:
            return
        length = len(prompts[rows[0]])
        searches = {number: self.stop_search() for number in rows} if self.stop_search is not None else {}
        self.model.decoder.begin()
        inputs = torch.tensor([list(prompts[number][:length]) for number in rows])
        while True:
            scores = self.model.decoder.advance(inputs.to(self.model.device))
            free = [row for row, number in enumerate(rows) if len(prompts[number]) <= length]
            next_tokens: Iterator[int] = iter(())
            if free:
                chosen = None
                if scores is not None:
                    free_scores = scores[free, : self.model.vocabulary].float().cpu()
                    if self.sampling.repetition != 1:
                        texts = [[*prompts[rows[row]], *continuations[rows[row]].tokens] for row in free]
                        free_scores = self.sampling.penalize(free_scores, texts)
                    chosen = self.sampling.choose(free_scores, draws.next([rows[row] for row in free]))
                next_tokens = iter(self.model.share_tokens(chosen, len(free)).tolist())
            following, staying = [], []
            for row, number in enumerate(rows):
                prompt, text = prompts[number], continuations[number]
                if len(prompt) > length:
                    token = prompt[length]
                else:
                    token = next(next_tokens)
                    text.ended = token == self.model.end
                    if not text.ended:
                        text.tokens.append(token)
                        if each is not None:
                            each(number, token)
                        if number in searches:
                            searches[number].add(token)
                            text.ended = searches[number].stopped
                    if text.ended or len(text.tokens) == self.left(prompt):
                        continue
                staying.append(row)
                following.append(token)
            if not staying:
                return
            if len(staying) < len(rows):
                self.model.decoder.select(staying)
                rows = [rows[row] for row in staying]
            inputs, length = torch.tensor(following)[:, None], length + 1

    def left(self, prompt: Sequence[int]) -> int:
        """Return the largest number of tokens that can follow a prompt."""
        longest = self.model.longest
        return self.count if longest is None else min(self.count, longest - len(prompt))
