"""What a run begins with instead of random numbers: its settings and its model, compared with a file's tensors.

What does not fit is told when weights are imported, not when a job that has waited in a queue starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import torch

from mpitrain.checkpoint.convert import import_weights, os_errors
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.planner.subject import Subject, description_of
from mpitrain.storage.disk import write_whole
from mpitrain.storage.run_folder import CHECKPOINTS, CONFIG

_SHOWN = 3  # differences in one message
Shapes = Mapping[str, Sequence[int]]


def import_plain(file: Path, run: Path, arguments: Sequence[str]) -> Path:
    """Make a run whose checkpoint of step 0 has a file's tensors, under the names that they have there.

    Args:
        file: A .safetensors file, or one that torch.save made.
        run: The run folder. Where its settings are known, by its config.toml or by `arguments`, the tensors must be
            those of the run's model.
        arguments: Settings as on the command line of a training, which go to the folder's config.toml.

    Returns:
        The folder of the checkpoint.

    Raises:
        InputError: See `import_weights`; or the tensors are not those of the run's model.
    """
    config = settings_of(run, arguments) if arguments or os.path.lexists(run / CONFIG) else None

    def check(tensors: Mapping[str, torch.Tensor]) -> None:
        if config is not None:
            require_model_of(config, {name: tensor.shape for name, tensor in tensors.items()}, str(file))

    with ExitStack() as stack:
        if config is not None:
            stack.enter_context(kept_settings(run, config))
        return import_weights(file, run / CHECKPOINTS, check)


def settings_of(run: Path, arguments: Sequence[str]) -> Config:
    """The settings of a run: those in its folder, or those of a command line.

    Raises:
        InputError: They are wrong, or there are both.
    """
    file = run / CONFIG
    if not os.path.lexists(file):
        return Config.from_args([*arguments, "--run.dir", str(run)])
    if arguments:
        raise InputError(f"{file} has this run's settings already, so {arguments[0]} has no place; change it there")
    return Config.from_args([str(file)])


@contextmanager
def kept_settings(run: Path, config: Config) -> Iterator[None]:
    """Write the settings into the run's folder, where there are none yet; take them away if the import inside fails.

    The checkpoint comes last: where there is one, the import has succeeded.
    """
    path, wrote = run / CONFIG, False
    with os_errors(path):
        if not os.path.lexists(path):
            run.mkdir(parents=True, exist_ok=True)
            write_whole(path, config.to_toml())
            wrote = True
    try:
        yield
    except BaseException:
        if wrote:
            path.unlink(missing_ok=True)
        raise


def require_model_of(config: Config, shapes: Shapes, origin: str) -> None:
    """Raise InputError unless tensors have the names and the shapes of the run's model.

    Args:
        config: The run's settings; its data are looked at, because they shape the model.
        shapes: Of the tensors, by their names.
        origin: What has them.
    """
    module = Subject(config, description_of(config), real=False).module
    every = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    first = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    later = {name for name, _ in module.named_parameters(remove_duplicate=False)} - first  # tied
    told = list(islice(differences(every, shapes, later), _SHOWN))
    if told:
        raise InputError(f"{origin} is not of the run's model: {'; '.join(told)}; mend [model] or give other weights")


def differences(wanted: Shapes, given: Shapes, optional: set[str] | frozenset[str] = frozenset()) -> Iterator[str]:
    """In words, what tensors lack, have in another shape, and have too many.

    Args:
        wanted: The shapes of the model's tensors.
        given: The shapes of those that there are.
        optional: Of the model's names those that may be missing.
    """
    for name, shape in wanted.items():
        if name not in given:
            if name not in optional:
                yield f"{name} {list(shape)} is missing"
        elif tuple(given[name]) != tuple(shape):
            yield f"{name} is {list(given[name])} and not {list(shape)}"
    for name in given:
        if name not in wanted:
            yield f"{name!r:.100} is none of the model's"
