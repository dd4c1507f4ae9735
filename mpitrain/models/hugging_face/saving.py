"""A trained model of transformers as a folder that `from_pretrained` loads, with its tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from mpitrain.models.hugging_face.build import PREFIX
from mpitrain.models.hugging_face.facade import Facade
from mpitrain.models.hugging_face.folder import quiet
from mpitrain.storage.disk import sync

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
