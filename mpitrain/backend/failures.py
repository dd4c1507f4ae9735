"""Our errors as torch's clients expect them: what goes wrong in a process group is a RuntimeError, too, and a wrong
argument a ValueError.
"""

from __future__ import annotations

from mpitrain.errors import CommunicationError, InputError


class GroupError(CommunicationError, RuntimeError):
    """An operation of a process group was misused or did not complete."""


class ArgumentError(InputError, ValueError):
    """An argument that a process group cannot work with."""


def translation(error: BaseException) -> BaseException:
    """The communicator's error as one of a process group; another error as it is."""
    if isinstance(error, CommunicationError) and not isinstance(error, GroupError):
        return GroupError(str(error), agreed=error.agreed)
    if isinstance(error, InputError) and not isinstance(error, ArgumentError):
        return ArgumentError(str(error), agreed=error.agreed)
    return error
