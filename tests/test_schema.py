"""The JSON schema of the configuration accepts and refuses what the configuration does."""

from __future__ import annotations

import json
import sys

import jsonschema
import pytest
from support import ROOT

from mpitrain.config import schema
from mpitrain.config.section import declared
from mpitrain.config.settings import Config, sections
from mpitrain.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VALIDATOR = jsonschema.Draft202012Validator(schema.schema())


def test_the_file_in_the_package_is_current():
    expected = "run python -m mpitrain.config.schema > schema.json, and move the file to mpitrain/config/"
    assert schema.FILE.read_text(encoding="utf-8") == schema.text(), expected


def test_every_setting_and_alias_is_in_it():
    VALIDATOR.check_schema(schema.schema())
    for section, settings in sections().items():
        properties = schema.schema()["properties"][section]["properties"]
        for key, field in settings.items():
            assert properties[key]["description"] == field.description
            assert all(properties[alias]["deprecated"] for alias in declared(field, "alias"))
            assert not {"alias", "also", "decisive"} & properties[key].keys()


def test_files_of_settings_are_valid():
    VALIDATOR.validate(json.loads(json.dumps(Config().to_dict())))
    VALIDATOR.validate(tomllib.loads(Config.from_args(["--model.name", "mlp", "--train.epochs", "2"]).to_toml()))
    for path in (ROOT / "examples").rglob("*.toml"):
        VALIDATOR.validate(tomllib.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("[train]\nsteps = 3\nlearning_rate = 0.1", True),
        ("[train]\nmax_steps = 3", True),
        ("[train]\nrecompute = 'every 2'\nbatch_warmup = [[100, 8]]", True),
        ("[parallel]\nmode = 'server'\nstaleness = 'none'", True),
        ("[train]\nstpes = 3", False),
        ("[trian]\nsteps = 3", False),
        ("[train]\nsteps = 'three'", False),
        ("[train]\nsteps = -1", False),
        ("[train]\nprecision = 'fp8'", False),
        ("[parallel]\nstaleness = 'some'", False),
        ("[parallel]\naxes = {'no axis' = 2}", False),
    ],
)
def test_it_agrees_with_the_configuration(text, good):
    values = tomllib.loads(text)
    assert VALIDATOR.is_valid(values) == good
    try:
        Config.from_dict(values)
    except InputError:
        assert not good
    else:
        assert good
