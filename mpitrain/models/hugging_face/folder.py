"""A folder with a model of Hugging Face: its configuration and its weights, read by transformers without a network, and
written with its tokenizer as `from_pretrained` loads them.

Nothing in it is executed: no Python of the folder, and of weights that torch.save wrote tensors alone are taken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.config.named import told
from mpitrain.errors import InputError, refusal
from mpitrain.models.hugging_face.families import Facade
from mpitrain.storage.disk import sync

PREFIX = "hf:"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SHOWN = 3  # names of tensors in a message


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a config.json, and what model.options change of it.

    Attributes:
        path: The folder.
        config: What transformers makes of its config.json.
        named: How messages name it.
    """

    path: Path
    config: Any
    named: str

    def make(self, kind: str, new: tuple[str, ...] = ()) -> nn.Module:
        """The model in fp32, with the folder's weights or random ones, of torch's generator.

        Args:
            kind: Name of the class of transformers that knows which model it is, "AutoModelForCausalLM" for instance.
            new: How names of parameters begin that may be missing or of another shape, and are then random.

        Raises:
            InputError: transformers refuses the folder, or weights are missing.
        """
        import transformers

        auto = getattr(transformers, kind)
        with quiet(), refused(self.named, "give another folder, or mend it"):
            if not any((self.path / name).is_file() for name in _WEIGHTS):
                return auto.from_config(self.config, trust_remote_code=False).float()
            model, found = auto.from_pretrained(
                str(self.path),
                config=self.config,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        mismatched = {each[0] if isinstance(each, tuple) else each for each in found.get("mismatched_keys", ())}
        lacking = [name for name in sorted({*found["missing_keys"], *mismatched}) if not name.startswith(new or "\0")]
        if lacking:
            more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
            raise InputError(
                f"{self.named}: the weights lack {', '.join(lacking[:_SHOWN])}{more} of a "
                f"{type(model).__name__} of these sizes; give the folder of a whole one"
            )
        return model.float()


def open_folder(named: str, path: str, options: Mapping[str, Any]) -> ModelFolder:
    """Read a folder's config.json.

    Args:
        named: The setting, for messages.
        path: The folder.
        options: Keys of the configuration that are to have other values.

    Raises:
        InputError: There is no such folder, transformers is missing or refuses it, or an option is unknown. Not agreed:
            a folder may be missing on one node alone.
    """
    folder = Path(path).expanduser()
    if not path or not folder.is_dir():
        raise InputError(
            f"{named}: there is no folder {path!r}; give a folder with a config.json (nothing is downloaded: "
            "`hf download NAME --local-dir FOLDER` does that)"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"{named}: {folder} has no config.json; give the folder that save_pretrained wrote")
    require_transformers(named)
    from transformers import AutoConfig

    with quiet(), refused(named, "mend its config.json"):
        config, unknown = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **options
        )
    if unknown:
        raise refusal(f"{named}: model.options {sorted(unknown)} are no keys of its config.json; remove them")
    return ModelFolder(folder, config, named)


def require_transformers(named: str) -> None:
    """Raise InputError where transformers is missing. It is not to ask the network for anything, from now on."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks fork and share cores
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise InputError(f'{named} needs the package transformers; pip install "mpitrain[hf]"') from None


@contextmanager
def refused(named: str, mend: str) -> Iterator[None]:
    """Whatever transformers raises inside becomes one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"{named}: {told(error)}; {mend}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing and draws no progress bars inside: every rank would."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


SHARD = 5 * 10**9  # bytes of a file, at most
_BESIDE = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"]
_BESIDE += ["chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json"]


def save_folder(
    module: Facade, factory: str, state: Mapping[str, torch.Tensor], target: Path, shard: int = SHARD
) -> None:
    """Write config.json, the weights in safetensors files, and what lies beside the weights that were trained.

    Args:
        module: The model.
        factory: The setting it was made by, "hf:PATH".
        state: Its tensors by the names that transformers gives them.
        target: The folder to make.
        shard: Bytes of a file, at most; several files have an index.
    """
    from transformers import AutoConfig

    source, config = Path(factory.removeprefix(PREFIX)).expanduser(), module.inner.config
    with quiet():
        if hasattr(config, "use_cache"):  # which training switches off
            config.use_cache = AutoConfig.from_pretrained(str(source), local_files_only=True).use_cache
        module.inner.save_pretrained(target, state_dict=dict(state), max_shard_size=shard)
    for pattern in _BESIDE:
        for path in source.glob(pattern):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)
    for path in target.iterdir():
        sync(path)
