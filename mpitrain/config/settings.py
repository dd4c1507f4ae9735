"""One validated configuration: a TOML file, then `--section.key value` arguments over it.

Each setting is declared once, in `run.py`, `training.py` or `parallel.py`, with its type, default, sentence and range;
names to choose among come from `mpitrain.choices`. An unknown key is an error that suggests the nearest name; nothing
is ignored in silence. Neither torch nor MPI is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError, model_validator

from mpitrain import early
from mpitrain.config import by_model, command_line
from mpitrain.config.aliases import Say, by_our_names
from mpitrain.config.messages import COMMAND_LINE, check_names, wrong_value
from mpitrain.config.parallel import CommSection, ParallelSection
from mpitrain.config.run import CheckpointSection, DataSection, ElasticSection, MonitorSection, RunSection
from mpitrain.config.section import Section, Sections
from mpitrain.config.toml_file import read_toml
from mpitrain.config.training import INSTEAD, ModelSection, OptimSection, TrainSection


class Config(Section):
    """The whole configuration of a run. Attributes are the TOML sections."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    monitor: MonitorSection = MonitorSection()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        return by_model.completed(values) if isinstance(values, Mapping) else values

    @staticmethod
    def from_dict(values: Mapping[str, Any], origin: str = "config", say: Say = early.say) -> Config:
        """Check nested values ({"train": {"steps": 10}}).

        Args:
            values: The settings; names of other tools that mean the same are accepted.
            origin: Name of the source, for messages.
            say: Called with a line for each such name.

        Raises:
            InputError: A key or a value is wrong; the message names it and the mend.
        """
        values = by_our_names(values, sections(), origin, say)
        check_names(values, sections(), origin)
        return _checked(values, {}, origin)

    @staticmethod
    def from_args(arguments: Sequence[str], say: Say = early.say) -> Config:
        """Read a command line, `[FILE.toml] [--section.key value | --section.key=value]...`.

        Flags win over the file, and later flags over earlier ones, wherever the file is named: --train.epochs over
        train.steps as well.

        Args:
            arguments: Words of the command line.
            say: Called with a line for each name of other tools that was accepted.

        Raises:
            InputError: As `from_dict`, or the file cannot be read.
        """
        file, given = command_line.parse(arguments, sections(), say)
        values = {} if file is None else by_our_names(read_toml(file), sections(), file, say)
        check_names(values, sections(), file or COMMAND_LINE)
        for key, other, _ in INSTEAD:
            if (flagged := {key, other} & given.get("train", {}).keys()) and "train" in values:
                for each in {key, other} - flagged:
                    values["train"].pop(each, None)
        for section, keys in given.items():
            values.setdefault(section, {}).update(keys)
        by_flags = {f"{section}.{key}": COMMAND_LINE for section, keys in given.items() for key in keys}
        return _checked(values, by_flags, file or COMMAND_LINE)

    def to_toml(self) -> str:
        """All settings as the text of a TOML file that reads back as this configuration."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as nested values that read back as this configuration.

        Without train.steps where it follows from train.epochs, and likewise without train.microbatch.
        """
        values = self.model_dump()
        for key, other, _ in INSTEAD:
            if values["train"][key]:
                del values["train"][other]
        return values


def sections() -> Sections:
    """Every setting there is, by section and key."""
    return {name: field.annotation.model_fields for name, field in Config.model_fields.items()}  # type: ignore[union-attr]


def help_text(program: str) -> str:
    """What --help prints for a command that takes a whole configuration."""
    return command_line.help_text(program, sections())


def _checked(values: Mapping[str, Any], origin: Mapping[str, str], otherwise: str) -> Config:
    """origin: where single keys come from, by section.key. otherwise: where all others do."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise wrong_value(error, origin, otherwise) from None
