"""Writer of the pages of the reference, which list every setting, every command and every public name.

`python docs/generated.py` writes them into docs/reference/; `docs/build.sh` calls it.
"""

from __future__ import annotations

import html
import inspect
import io
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mpitrain.config.preset import defaults_by_model
from mpitrain.config.section import declared
from mpitrain.config.settings import Config

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("train", "evaluate", "generate", "predict", "data", "checkpoint", "adapters", "report", "plan")
COMMANDS += ("doctor", "backend", "run")
_UNDER = {"report": ["schedule"], "plan": ["--measure"], "doctor": ["--check", "--tune"]}
LIMITS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
VALUES = {
    "ANY_SOURCE": "Any rank, as the source of `recv` and `irecv`.",
    "__version__": "Version of the package, a text.",
}
PUBLIC = {  # pages' headings, and the modules whose public names are under them; "module:Name,Name" for some
    "The package": ["mpitrain"],
    "Steps and engines": [
        "mpitrain.trainer.run:Step,Restored,Run",
        "mpitrain.trainer.user_loop.training_engine:TrainingEngine",
        "mpitrain.trainer.user_loop.training_engine:PipelineEngine",
        "mpitrain.trainer.memory:MemoryAccount",
    ],
    "Communication": [
        "mpitrain.comm:Letter,Mailbox,carry_device_memory,set_timeout",
        "mpitrain.comm.collectives.persistent:PersistentCall",
        "mpitrain.comm.compression",
    ],
    "Pipelines and tensor parallel layers": [
        "mpitrain.layout.mesh:Mesh,MeshAxis",
        "mpitrain.pipe.pipeline:Pipeline",
        "mpitrain.pipe.executor:Upcoming",
        "mpitrain.pipe.versions:WeightVersions",
        "mpitrain.pipe.schedule:Backward,BackwardInput,BackwardWeight,Compute,Forward,PipelineProgram,Receive,Schedule",
        "mpitrain.pipe.schedule:ScheduleError,Send,make_schedule",
        "mpitrain.tensor",
    ],
    "Models": ["mpitrain.models.task", "mpitrain.layers.loss_terms:LossTerm"],
    "Data": [
        "mpitrain.data",
        "mpitrain.data.on_device:on_device",
        "mpitrain.data.prepare:Found,Kind,PrepareOptions,prepare",
        "mpitrain.data.writer:Source",
        "mpitrain.data.format:FieldSpec",
    ],
    "Trained models": ["mpitrain.loading:load_task,load_weights"],
    "Checkpoints": ["mpitrain.checkpoint:Manifest,Store,TensorSpec"],
    "Algorithms of collectives": [
        "mpitrain.comm.selection:Algorithm,Algorithms",
        "mpitrain.comm.programs.program",
        "mpitrain.comm.programs.verify:ProgramError,verify",
    ],
    "Reading what a run has written": [
        "mpitrain.monitor:read_metrics,read_goodput",
        "mpitrain.monitor.report.goodput:Goodput",
    ],
    "Errors": ["mpitrain.errors:MpitrainError,InputError,CommunicationError,CheckpointError,NothingLearned"],
}


def write(folder: Path) -> None:
    """Write the pages into a folder. Pages without changes keep their time, so that Sphinx does not read them again."""
    folder.mkdir(exist_ok=True)
    for name, text in (("config.md", config_page()), ("commands.md", commands_page()), ("api.md", api_page())):
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# -- settings


def config_page() -> str:
    """Every setting, by section."""
    lines = [
        "# Every setting",
        "",
        "A setting is a line `key = value` under `[section]` in a TOML file, or `--section.key value` on the command",
        "line, which takes precedence. Names that other tools use for the same setting are accepted. For the name of a",
        "similar setting, the error names the one to use here.",
    ]
    for section, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        lines += ["", f"## [{section}]", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, setting in model.model_fields.items():
            meaning = html.escape(setting.description or "", quote=False)
            for kind, relation in (("alias", "also accepted as"), ("also", "compare")):
                if names := declared(setting, kind):
                    meaning += f" ({relation} {', '.join(f'`{name}`' for name in names)})"
            default = "; ".join(filter(None, [f"`{_toml(setting.default)}`", defaults_by_model(section, key)]))
            cells = (f"`{section}.{key}`", _type(setting), default, meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(setting: FieldInfo) -> str:
    limits = [limit for each in setting.metadata if (limit := _limit(each))]
    return ", ".join([_kind(setting.annotation), *limits])


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in arguments)
    if origin is Annotated:
        limits = [limit for each in arguments[1:] if (limit := _limit(each))]
        return " ".join([_kind(arguments[0]), *limits])
    if origin in (Union, UnionType):
        return " or ".join(_kind(each) for each in arguments)
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}"
    if origin is dict or annotation is dict:
        return "table"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[annotation]


def _limit(constraint: Any) -> str:
    for name, word in LIMITS.items():
        value = getattr(constraint, name, None)
        if value is not None:
            return f"{word} 2^63" if value == 2**63 else f"{word} {value:g}"
    patterns = [getattr(constraint, "pattern", None)]
    return f"as `{patterns[0]}`" if patterns[0] else ""


def _toml(value: Any) -> str:
    import tomli_w

    return "{}" if value == {} else tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


# -- commands


def commands_page() -> str:
    """Return the page of commands: the output of `--help` of every command and subcommand."""
    lines = ["# Every command", "", "The output of each command with `--help`."]
    for command in COMMANDS:
        text = help_of(command)
        lines += ["", f"## mpitrain.{command}", "", "```text", text, "```"]
        for word in under(command, text):
            lines += ["", f"### mpitrain.{command} {word}", "", "```text", help_of(command, word), "```"]
    return "\n".join(lines) + "\n"


def under(command: str, text: str) -> list[str]:
    """Return the subcommands listed in `text`, the output of a command's `--help`."""
    if command in _UNDER:
        return _UNDER[command]
    match = re.search(r"^positional arguments:\n  \{([\w,]+)\}", text, re.MULTILINE)
    return match[1].split(",") if match else []


def help_of(command: str, *words: str) -> str:
    """Return what `python -m mpitrain.COMMAND WORDS --help` prints.

    Raises:
        RuntimeError: If the command fails.
    """
    import torch  # noqa: F401  # before the fork, which then takes no time

    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if not child:
            code = 1
            with suppress(BaseException):
                code = _run_help(command, words, out.fileno())
            os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        text = out.read().strip()
    if status or not text:
        raise RuntimeError(f"python -m mpitrain.{' '.join([command, *words])} --help fails: {text}")
    return "\n".join(line.rstrip() for line in text.splitlines())


def _run_help(command: str, words: tuple[str, ...], out: int) -> int:
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["COLUMNS"] = "110"
    sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.argv = [f"mpitrain.{command}", *words, "--help"]
    try:
        runpy.run_module(f"mpitrain.{command}", run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


# -- public names


def api_page() -> str:
    """Return the page of public names, as directives of Sphinx's autodoc."""
    lines = [
        "# Every public name",
        "",
        "The first section lists the names of `import mpitrain as mt`. The other sections list names that extensions",
        "import from modules of the package. Modules that are not listed here may move.",
    ]
    listed: set[str] = set()
    for heading, modules in PUBLIC.items():
        lines += ["", f"## {heading}", ""]
        for module, name in _names(modules):
            if name not in listed:  # only under its first heading
                lines += _directive(module, name)
                listed.add(name)
    return "\n".join(lines) + "\n"


def _names(modules: list[str]) -> Iterator[tuple[str, str]]:
    for entry in modules:
        name_of_module, _, some = entry.partition(":")
        module = import_module(name_of_module)
        names = some.split(",") if some else getattr(module, "__all__", None) or _defined_in(module)
        yield from ((name_of_module, name) for name in names)


def _defined_in(module: Any) -> list[str]:
    """Return the public names that a module defines, in the order of their definition."""
    return [n for n, x in vars(module).items() if n[0] != "_" and getattr(x, "__module__", None) == module.__name__]


def _directive(module: str, name: str) -> list[str]:
    value = getattr(import_module(module), name)
    kind = "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
    if inspect.ismodule(value) or (kind == "data" and name not in VALUES):
        return []
    if kind == "data":
        return ["```{eval-rst}", f".. py:data:: {module}.{name}", "", f"   {VALUES[name]}", "```", ""]
    if inspect.isclass(value) and issubclass(value, Exception):
        kind = "exception"
    options = (
        ["   :members:", "   :inherited-members: object,Exception,Module,tuple,BaseModel"] if kind == "class" else []
    )
    return ["```{eval-rst}", f".. auto{kind}:: {module}.{name}", *options, "```", ""]


if __name__ == "__main__":
    write(ROOT / "docs" / "reference")
