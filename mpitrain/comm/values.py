"""Small values between the ranks of a communicator, and what ranks agree on. `objects` carries them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitrain.comm import objects

if TYPE_CHECKING:
    from mpitrain.comm.communicator import Communicator


class Values:
    """Values are what JSON can hold. All methods are collective."""

    def broadcast_object(self: Communicator, value: Any, root: int = 0) -> Any:  # type: ignore[misc]
        """The root's value, on every rank."""
        return objects.broadcast(self, value, root)

    def all_gather_object(self: Communicator, value: Any) -> list[Any]:  # type: ignore[misc]
        """Every rank's value, in order of rank."""
        return objects.all_gather(self, value)

    def gather_objects(self: Communicator, value: Any, root: int = 0) -> list[Any]:  # type: ignore[misc]
        """Every rank's value, in order of rank, on the root; an empty list elsewhere."""
        return objects.gather(self, value, root)

    def agree(self: Communicator, error: BaseException | None) -> None:  # type: ignore[misc]
        """Raise on every rank if any rank has an error: the first such rank's."""
        objects.agree(self, error)

    def on_root(self: Communicator, function: Callable[[], Any], root: int = 0) -> Any:  # type: ignore[misc]
        """Call a function on one rank; every rank returns its value or raises its error."""
        return objects.on_root(self, function, root)
