"""The pages are right: their commands run, their keys and options exist, their links lead somewhere."""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
from functools import cache

import pytest
import setups
import snippets
from snippets import Snippet, commands, pages, run
from support import ROOT

from mpitrain.comm.communicator import Communicator
from mpitrain.config.settings import Config, our_name, parse, sections
from mpitrain.config.toml_file import tomllib
from mpitrain.data.folders import DIGITS, resolve
from mpitrain.early import rehearsal_options
from mpitrain.errors import InputError

sys.path.insert(0, str(ROOT / "docs"))
import generated

BLOCKS = [block for page in pages() for block in snippets.snippets(page)]
LANGUAGES = {"bash", "console", "python", "toml", "json", "text"}
PAGES = sorted({block.page for block in BLOCKS if block.script and not block.skip and not block.quick})
PAGES.remove(ROOT / "docs/examples.md")  # tests/examples runs its commands, and looks at what they print
KEY = re.compile(r"--([a-z]+)\.([a-z_]+)")
# not of those that pages also call a module or an array: `model.forward`, `data.shape`
QUOTED = re.compile(rf"`({'|'.join({*sections()} - {'model', 'data'})})\.([a-z_]+)\b(?!\()")
OWN_FLAGS = re.compile(r"--[a-z][a-z-]*")


def name_of(value: object) -> str:
    return value.stem if hasattr(value, "stem") else str(value)


def test_every_block_names_its_language():
    for block in BLOCKS:
        assert block.language.strip("{}") in LANGUAGES | {"toctree", "include", "literalinclude"}, block
        if block.language == "bash":
            result = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert result.returncode == 0, f"{block}: {result.stderr}"
        elif block.language == "python":
            ast.parse(block.text, str(block))
        elif block.language == "toml":
            values = tomllib.loads(block.text)
            if set(values) <= set(sections()):
                Config.from_dict(values)
        elif block.language == "text":
            assert not re.search(r"^(mpirun|python -m|jobs/|srun) ", block.text, re.M), f"{block}: commands are ```bash"


def test_commands_are_in_blocks_that_run():
    for page in pages():
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert not re.match(r"( {4,}|\t)(\$ )?(python -m|mpirun|srun|sbatch|jobs/)", line), f"{page.name}:{number}"


def test_every_named_key_exists():
    known = sections()
    for page in pages():
        text = page.read_text()
        assert not (deeper := re.search(r"--[a-z]+\.[a-z_]+\.\w+", text)), f"{page.name}: no setting {deeper[0]}"
        for section, key in KEY.findall(text):
            section, key = our_name(section, key)  # a page may use a name of other tools
            assert (section, key) == ("section", "key") or key in known.get(section, ()), (
                f"{page.name}: --{section}.{key}"
            )
        for section, key in QUOTED.findall(text):
            room = ROOT / "mpitrain" / section
            file = key in ("py", "h5") or (room / key).exists() or (room / f"{key}.py").exists()
            method = section == "comm" and hasattr(Communicator, key)
            assert file or method or key in known[section], f"{page.name}: `{section}.{key}`"


def test_the_trainer_accepts_every_training_command():
    for block in BLOCKS:
        for module, words in commands(block):
            if module == "mpitrain.train" and "--help" not in words:
                _, values = parse(rehearsal_options(words)[1])
                for key in ("preset", "base"):  # files that blocks have made
                    values.get("model", {}).pop(key, None)
                try:
                    Config.from_dict(values)
                except InputError as error:
                    pytest.fail(f"{block}: {error}")


@cache
def help_text(command: str, *words: str) -> str:
    return generated.help_of(command, *words)


def test_every_option_of_a_command_exists():
    for block in BLOCKS:
        for module, words in commands(block):
            command = module.removeprefix("mpitrain.")
            if command == "train":
                continue
            assert command in generated.COMMANDS, f"{block}: there is no mpitrain.{command}"
            flags = [f for word in words if (f := word.partition("=")[0]).startswith("--") and "." not in f]
            if command == "backend" or not set(flags) - {"--help"}:
                continue
            text = help_text(command)
            if words[0] in generated.under(command, text):
                text = help_text(command, words[0])
            for flag in flags:
                assert flag == "--help" or flag in OWN_FLAGS.findall(text), f"{block}: {command} has no {flag}"


def test_every_linked_file_exists():
    for page in pages():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w.-]*)?\)", page.read_text()):
            if not re.match(r"\w+://", target) and not target.startswith("reference/"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_link_has_text():
    for page in pages():
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert "[](" not in line, f"{page.name}:{number}: where Markdown is shown as it is, this is a hole"


def test_every_setting_is_in_the_reference():
    page = generated.config_page()
    for section, keys in sections().items():
        for key, setting in keys.items():
            (line,) = [line for line in page.splitlines() if line.startswith(f"| `{section}.{key}` |")]
            assert html.escape(str(setting.description), quote=False).replace("|", "\\|") in line


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.quick], ids=str)
def test_an_independent_block_runs(block: Snippet, tmp_path):
    performed(block, tmp_path)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_a_page_runs(page, tmp_path, data):
    (tmp_path / "data").mkdir()
    for dataset in data:
        (tmp_path / "data" / dataset.name).symlink_to(dataset)
    for name in ("jobs", "tests", "docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in snippets.snippets(page):
        if not block.skip and not block.quick:
            performed(block, tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the folders of the bundled data sets, made once for all pages."""
    folder = tmp_path_factory.mktemp("data")
    return [resolve(word, folder) for word in ("", DIGITS)]


def performed(block: Snippet, folder) -> None:
    for name in block.setups:
        getattr(setups, name)(folder)
    name, _ = block.file
    if name:
        (folder / name).write_text(block.text + "\n")
    if block.script:
        result = run(block.script, folder)
        assert result.returncode == 0, f"{block}:\n{block.script}\n{result.stdout[-2000:]}{result.stderr[-3000:]}"


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_the_pages_build_without_warnings(tmp_path):
    result = subprocess.run([str(ROOT / "docs/build.sh"), "-E"], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr[-3000:]
    site = ROOT / "docs/_build/html"
    assert all((site / f"{page.stem}.html").exists() for page in (ROOT / "docs").glob("*.md"))
    assert "mpitrain.Communicator.all_reduce" in (site / "reference/api.html").read_text()
