"""Elastic training: after the death of ranks, the others continue from the state that they committed last.

It needs Open MPI's fault tolerance (`mpirun --with-ft ulfm`): MPI ends the job otherwise. Ranks are never added.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch

from mpitrain.horovod.torch.objects import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from mpitrain.horovod.torch.session import rank, recover, size


class HostsUpdatedInterrupt(RuntimeError):
    """Request to synchronize the state and go on.

    Attributes:
        skip_sync: True if the state need not be copied from rank 0.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were updated")
        self.skip_sync = skip_sync


class State:
    """State of a training, which is committed, restored, and copied from rank 0 to all ranks."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Call these functions whenever the number of ranks has changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a new number of ranks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory: after the death of ranks, training continues from here."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: ranks are never added."""

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state from rank 0 to all ranks. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new number of ranks; called before the callbacks."""


class ObjectState(State):
    """State of plain values, which are attributes of this object.

    Args:
        bcast_object: Function that returns rank 0's value on all ranks; by default `broadcast_object`.
        get_rank: Not used.
        values: Values by name.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Any = None, **values: Any
    ) -> None:
        super().__init__()
        self._bcast_object, self._saved_state = bcast_object, values
        self._set_attributes()

    def save(self) -> None:
        """Save the values."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Return to the saved values."""
        self._set_attributes()

    def sync(self) -> None:
        """Take rank 0's saved values on all ranks. Collective."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class TorchState(ObjectState):
    """State of models, optimizers, samplers and plain values, which are attributes of this object.

    Args:
        model: Model, if any.
        optimizer: Optimizer, if any.
        values: More of them, by name.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer} | values
        self._stateful = {name: value for name, value in values.items() if hasattr(value, "state_dict")}
        self._saved: dict[str, Any] = {}
        super().__init__(**{name: value for name, value in values.items() if name not in self._stateful})
        for name, value in self._stateful.items():
            setattr(self, name, value)
        self._save_stateful()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_stateful", {}) and self._stateful[name] is not value:
            self._stateful[name] = value
            self._saved[name] = copy.deepcopy(value.state_dict())

    def _save_stateful(self) -> None:
        self._saved = {name: copy.deepcopy(value.state_dict()) for name, value in self._stateful.items()}

    def save(self) -> None:
        """Save everything in memory."""
        self._save_stateful()
        super().save()

    def restore(self) -> None:
        """Return to what was saved last."""
        for name, value in self._stateful.items():
            value.load_state_dict(copy.deepcopy(self._saved[name]))
        super().restore()

    def sync(self) -> None:
        """Copy everything from rank 0 to all ranks. Collective."""
        for value in self._stateful.values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict()))
        self._save_stateful()
        super().sync()

    def reset(self) -> None:
        """Divide the samples that are left among the ranks that are left."""
        for value in self._stateful.values():
            if isinstance(value, ElasticSampler):
                value.reset()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler that divides a data set among the ranks, and after a loss of ranks what is left of the epoch.

    Call `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: Data set of constant length.
        shuffle: If true, samples are shuffled.
        seed: Seed of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no sample has been processed.

        Args:
            epoch: Number of the epoch.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed a batch.

        Args:
            batch_idx: Not used.
            batch_size: Samples of a rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a position in the data."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that have not been processed among the ranks."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples; some are repeated if the ranks' numbers would differ."""
        left = self.remaining_indices
        padded = left + [left[n % len(left)] for n in range(self.total_size - len(left))]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that trains with a state, again from the last commit whenever ranks have died.

    Args:
        function: Function whose first argument is the `State`.
    """

    @functools.wraps(function)
    def train(state: State, *args: Any, **kwargs: Any) -> Any:
        must_sync = True
        while True:
            try:
                if must_sync:
                    state.sync()
                return function(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                must_sync = not interrupt.skip_sync
            except Exception as error:  # a rank's death may surface as any error
                if not recover(error):
                    raise
                state.restore()
                must_sync = True
            state.on_reset()

    return train
