"""Random generators in a user's training loop: their checkpoints, and separate random numbers for a divided model.

The generators of a rank (Python's, NumPy's, torch's for the host and for the rank's device) are stored as one byte
tensor `random/<rank>` of a checkpoint, which contains JSON and no pickled objects. On the mesh that saved them, each
rank gets its own generators back. On another mesh they are seeded from the run's seed, the step, and the rank's place
along the data axis.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpitrain.checkpoint import Manifest, Part, TensorSpec
from mpitrain.comm.memory import device as devices
from mpitrain.layout.boxes import Piece
from mpitrain.layout.mesh import BLOCKS, PARTS, SAMPLES, Mesh
from mpitrain.trainer.data import seed_worker

RANDOM = "random/"
_MULTIPLE = 4096  # the tensor's bytes are padded to a multiple of this, so that their number rarely changes


class Generators:
    """Random generators of this rank. Collective to make.

    Args:
        mesh: Ranks that save and load together.
        device: Device of this rank.

    Attributes:
        seed: Seed for generators that are not restored from a checkpoint; rank 0's, the same on all ranks.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device, self._name = mesh, device, f"{RANDOM}{mesh.world.rank}"
        self.seed = int(mesh.world.broadcast_object(torch.initial_seed()))
        self._filled: torch.Tensor | None = None

    def part(self) -> Part:
        """Return the states of this rank's generators as a part of a checkpoint."""
        text = json.dumps(_states(self._device), default=lambda a: {"array": _text(a), "dtype": str(a.dtype)}).encode()
        text += b" " * (-len(text) % _MULTIPLE)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return Part(TensorSpec(self._name, tuple(data.shape), "uint8"), Piece.whole(self._name, data.numel()), data)

    def values(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores along with the states: seed and shape of the mesh."""
        return {"seed": self.seed, "mesh": list(self._mesh.shape.values())}

    def parts_to_load(self, manifest: Manifest) -> list[Part]:
        """Return the part that this rank reads from a checkpoint; empty if the mesh differs.

        `finish_load` then uses it.
        """
        self._filled, spec = None, manifest.tensors.get(self._name)
        if spec is None or manifest.values.get("random", {}).get("mesh") != list(self._mesh.shape.values()):
            return []
        self._filled = torch.empty(spec.shape, dtype=torch.uint8)
        return [Part(spec, Piece.whole(self._name, spec.numel), self._filled)]

    def finish_load(self, manifest: Manifest) -> None:
        """Restore the generators from the checkpoint, or seed them for its step if the mesh differs."""
        saved = manifest.values.get("random")
        if saved is None:  # saved by the trainer, which seeds each step
            return
        self.seed = int(saved["seed"])
        if self._filled is not None:
            _restore(json.loads(self._filled.numpy().tobytes(), object_hook=_decoded), self._device)
            return
        seed_worker(self.seed, manifest.step, self._mesh.replicas.rank)
        drawn = torch.initial_seed()
        random.seed(drawn)
        np.random.seed(drawn % (1 << 32))


class DividedDraws:
    """Random numbers of a model whose layers or stages are divided over ranks, separate from the user's generators.

    Tensor ranks must draw equal numbers, and stages draw different amounts. The model therefore uses its own seeds,
    derived from the step and the rank's place, and the user's generators remain equal on all ranks, for example to
    shuffle data.
    """

    def __init__(self, generators: Generators, mesh: Mesh, device: torch.device) -> None:
        self._generators, self._device = generators, device
        self._place = mesh.number(*mesh.dividing(SAMPLES, PARTS, BLOCKS))
        self._on = _devices(device)
        self._states: list[torch.Tensor] = []
        self._step = -1

    @contextmanager
    def drawing(self, step: int) -> Iterator[None]:
        """Use the model's generators of this step in the block, continuing after the last block of the same step."""
        with devices.preserve_generators(self._device):
            if step != self._step:
                seed_worker(self._generators.seed, step, self._place)
                self._step = step
            else:
                for on, state in zip(self._on, self._states, strict=True):
                    devices.set_generator_state(on, state)
            try:
                yield
            finally:
                self._states = [devices.generator_state(on) for on in self._on]

    def restart(self) -> None:
        """Forget the current step, because another state was loaded."""
        self._step = -1


def _devices(device: torch.device) -> list[torch.device]:
    """Return the devices on which this process draws random numbers: the host and its accelerator, if it has one."""
    return [devices.CPU, *([device] if devices.is_accelerator(device) else [])]


def _states(device: torch.device) -> dict[str, Any]:
    """Return the states of this process' generators, as JSON can represent them."""
    version, words, gauss = random.getstate()
    numbers: Mapping[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": [version, _text(np.array(words, dtype=np.uint32)), gauss],
        "numpy": numbers,
        "torch": [_text(devices.generator_state(of).numpy()) for of in _devices(device)],
    }


def _restore(states: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), gauss))
    np.random.set_state(states["numpy"])
    # not strict: a run may have moved between CPU and accelerator
    for of, state in zip(_devices(device), states["torch"], strict=False):
        devices.set_generator_state(of, torch.from_numpy(_array(state, np.uint8).copy()))


def _decoded(value: dict[str, Any]) -> Any:
    """Return the array that a JSON object encodes; other objects are returned as they are."""
    if set(value) != {"array", "dtype"}:
        return value
    return _array(value["array"], np.dtype(value["dtype"])).copy()


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
