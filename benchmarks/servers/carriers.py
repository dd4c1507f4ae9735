"""What ways of carrying gradients to a rank that serves, and parameters from there, have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpitrain.comm import Communicator, Letter

SERVER = 0  # the rank that serves; the others are workers


class Carrier:
    """One way of carrying. All ranks call its methods together.

    Attributes:
        x: A worker's gradient, which is pushed, and where the parameters are that were pulled.
        rows: What each worker has pushed, on the server; that is what it pulls as well. Empty where there is no server.
    """

    def __init__(self, desk: Desk) -> None:
        """Make x and rows, in ordinary memory."""
        self._desk = desk
        self.x = torch.zeros(desk.numel)
        self.rows = list(torch.zeros(desk.workers if desk.serves else 0, desk.numel))

    def push(self) -> None:
        """Return when the server has the worker's gradient where it can read it; a worker's x may then be written."""
        raise NotImplementedError

    def pull(self) -> None:
        """Return when the worker has the parameters in its own memory."""
        raise NotImplementedError

    def free(self) -> None:
        """Release the memory. Collective."""
        self.rows = []


class Desk:
    """What carriers have in common: who is who, and letters between them.

    Attributes:
        world: The ranks.
        serves: Whether this rank is the server.
        row: Of a worker's rows.
        workers: How many there are.
        numel: Elements of a gradient.
    """

    def __init__(self, world: Communicator, numel: int) -> None:
        self.world, self.numel = world, numel
        self.serves, self.row, self.workers = world.rank == SERVER, world.rank - 1, world.size - 1
        self._questions, self._answers = world.mailbox("questions"), world.mailbox("answers")

    def ask(self, payload: torch.Tensor | None = None) -> Any:
        """A worker asks."""
        return self._questions.post(SERVER, [self.row], payload)

    def asked(self, serve: Callable[[Letter], object] | None = None) -> None:
        """The server is asked, once by each worker."""
        for _ in range(self.workers):
            letter = self._questions.wait(range(1, self.world.size), "questions")
            if serve is not None:
                serve(letter)

    def tell(self, letter: Letter, payload: torch.Tensor | None = None) -> None:
        """The server answers."""
        self._answers.post(letter.source, [], payload)

    def told(self) -> Letter:
        """The answer that a worker gets."""
        return self._answers.wait([SERVER], "an answer")

    def free(self) -> None:
        """Release the letters. Collective."""
        for box in (self._questions, self._answers):
            box.free()
