"""`python -m mpitrain.adapters merge | peft`: export of adapters trained with model.lora. Needs no MPI.

python -m mpitrain.adapters merge RUN OUT       a whole model: the base with the adapters added to its weights
python -m mpitrain.adapters peft RUN FOLDER     only the adapters, in the format that `peft` loads onto the base
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mpitrain.checkpoint import contents
from mpitrain.checkpoint.convert import save_torch, write_safetensors
from mpitrain.config.training import ModelSection
from mpitrain.early import VERSION
from mpitrain.errors import EXIT_DONE, InputError, echo, exit_code_of
from mpitrain.inference.commands import add_trust
from mpitrain.loading import BASE, read_saved_model
from mpitrain.models import Task
from mpitrain.models.build import adapted_layers
from mpitrain.models.hugging_face import PREFIX, Facade, save_folder
from mpitrain.storage.disk import new_folder, replacing, require_new


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = make_parser().parse_args(argv)

    def act() -> int:
        echo(arguments.act(arguments))
        return EXIT_DONE

    return exit_code_of(act)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain.adapters", description="export adapters trained with model.lora"
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="write the model with the adapters added to its weights")
    merge.set_defaults(act=lambda arguments: write_merged(arguments.run, arguments.out, trust=arguments.trust))
    out = "a .safetensors or .pt file, or for an hf: model, a new folder that from_pretrained loads"
    peft = commands.add_parser("peft", help="write the adapters in peft's format")
    peft.set_defaults(act=lambda arguments: write_peft(arguments.run, arguments.out, trust=arguments.trust))
    for command, out_help in ((merge, out), (peft, "a new folder, for PeftModel.from_pretrained")):
        command.add_argument("run", type=Path, metavar="RUN", help="a run folder, or one step-... folder in it")
        command.add_argument("out", type=Path, metavar="OUT", help=out_help)
        add_trust(command)
    return parser


def _load_trained(path: Path, out: Path, trust: bool) -> tuple[Task, ModelSection]:
    """Return the model of a run with its trained adapters, and the [model] section that it was built from.

    Raises:
        InputError: The run trained no adapters, or its base is missing or has changed, or `out` exists.
        CheckpointError: The checkpoint is damaged.
    """
    require_new(out)
    saved = read_saved_model(contents.resolve(path), trust=trust)
    base = saved.manifest.values.get(BASE)
    if not isinstance(base, dict) or "rank" not in base.get("adapter", {}):
        raise InputError(f"{saved.folder} contains no adapters of model.lora; use python -m mpitrain.checkpoint export")
    return saved.load(), saved.section


def write_merged(run: Path, out: Path, *, trust: bool = False) -> str:
    """Write the model with the adapters added to its weights, with the names of a model without adapters.

    Args:
        run: A run folder, or one checkpoint.
        out: A new .safetensors or .pt file; for an hf: model, a new folder is possible as well.
        trust: If true, run code in the run's folder that the run names.

    Returns:
        Sentence that says what was written.
    """
    task, section = _load_trained(run, out, trust)
    folder = section.factory.startswith(PREFIX) and not out.suffix
    if not folder and out.suffix not in (".safetensors", ".pt"):
        raise InputError(f"{out}: unknown file ending; use .safetensors or .pt, or a folder for an hf: model")
    layers = adapted_layers(task.module)
    added = {f"{name}.{key}" for name in layers for key in ("lora_a", "lora_b")}
    state = {name: tensor for name, tensor in task.module.state_dict().items() if name not in added}
    with torch.no_grad():
        state |= {f"{name}.weight": layer.merged_weight().contiguous() for name, layer in layers.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) if folder else replacing(out) as temporary:
        if folder:
            assert isinstance(task.module, Facade)
            save_folder(task.module, section.factory, state, temporary)
        elif out.suffix == ".pt":
            save_torch(state, temporary)
        else:
            _write(state, temporary)
    return f"{out}: {len(state)} tensors, with {len(layers)} adapters of {run} merged"


def write_peft(run: Path, out: Path, *, trust: bool = False) -> str:
    """Write the adapters as adapter_config.json and adapter_model.safetensors.

    Args:
        run: A run folder, or one checkpoint.
        out: A new folder.
        trust: If true, run code in the run's folder that the run names.

    Returns:
        Sentence that says what was written.
    """
    task, section = _load_trained(run, out, trust)
    layers = adapted_layers(task.module)
    turned = {layer.transposed for layer in layers.values()}
    if len(turned) > 1:
        raise InputError(
            f"{run} has adapters of layers with weights in both orders, which peft has one setting for; use merge"
        )
    factory = section.factory
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if factory.startswith(PREFIX) else None,
        "base_model_name_or_path": section.base or factory.removeprefix(PREFIX) or section.name,
        "r": section.lora,
        "lora_alpha": section.lora_alpha,
        "lora_dropout": section.lora_dropout,
        "target_modules": list(layers),
        "fan_in_fan_out": turned == {True},
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {}
    for name, layer in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.lora_a.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.lora_b.detach().contiguous()
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as temporary:
        (temporary / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        _write(tensors, temporary / "adapter_model.safetensors")
    return f"{out}: {len(layers)} adapters of rank {section.lora} of {run}"


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(path, specs, tensors.__getitem__)


if __name__ == "__main__":
    sys.exit(main())
