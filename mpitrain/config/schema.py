"""JSON schema of the configuration, with which editors complete and check TOML files.

`python -m mpitrain.config.schema` prints it. It is generated from the declarations of the settings, and the package
contains it as the file `schema.json`, which a test compares with the declarations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpitrain.config.section import declared
from mpitrain.config.settings import Config, sections

FILE = Path(__file__).with_name("schema.json")
_OTHER_TOOLS = "train"  # section in which other tools keep all of their settings
_DECLARATION = ("alias", "also", "mode", "loop", "off", "decisive", "title")  # keys that are not part of the schema


def schema() -> dict[str, Any]:
    """Return the schema of a TOML file, by draft 2020-12 of JSON Schema.

    An alias, a name of another tool for a setting, is a deprecated property.
    """
    known = sections()
    properties = {name: _section_schema(name) for name in known}
    for name, settings in known.items():
        for key, field in settings.items():
            setting = properties[name]["properties"][key]
            deprecated = {"deprecated": True, "description": f"name of another tool for {name}.{key}"}
            for alias in declared(field, "alias"):
                for section in {name, _OTHER_TOOLS}:
                    if alias not in known[section]:
                        properties[section]["properties"][alias] = setting | deprecated
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration of mpitrain",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def text() -> str:
    """Return the content of `FILE`."""
    return json.dumps(schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _section_schema(name: str) -> dict[str, Any]:
    model = Config.model_fields[name].annotation
    result: dict[str, Any] = model.model_json_schema()  # type: ignore[union-attr]
    del result["title"]
    for setting in result["properties"].values():
        for key in _DECLARATION:
            setting.pop(key, None)
        if "patternProperties" in setting:  # which pydantic leaves open for other keys
            setting["additionalProperties"] = False
    return result


if __name__ == "__main__":
    print(text(), end="")
