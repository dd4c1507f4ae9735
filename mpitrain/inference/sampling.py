"""The choice of the next token from its scores: the likeliest, or one drawn.

    scores of tokens that the text has already are divided by the repetition penalty, or multiplied where they are
    negative (Keskar et al. 2019, CTRL)
    probabilities = softmax(scores / temperature), of which there stay
        top_k     the k likeliest tokens (Fan et al. 2018, Hierarchical neural story generation)
        top_p     then the fewest likeliest ones that together have p of what is left (nucleus sampling, Holtzman et al.
                  2020, The curious case of neural text degeneration)
        min_p     of these the ones at least min_p times as likely as the likeliest (Nguyen et al. 2025, min-p sampling)

A token is drawn by one number from 0 to 1, of which every prompt has a sequence of its own: it follows from the seed
and the prompt alone, so that a prompt goes on alike by itself and beside others.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpitrain.errors import refusal


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
