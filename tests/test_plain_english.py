"""Mechanical checks of docstrings and names. Whether a reader understands them, no program can tell."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from support import ROOT

from mpitrain.early import without_collecting

FIRST_WORDS = {
    "What",
    "Whether",
    "How",
    "Of",
    "Those",
    "Likewise",
    "Inside",
    "As",
    "Where",
    "Who",
    "When",
    "Which",
    "Why",
}
NO_VERBS = {"The", "This", "That", "These", "Its", "Their", "For", "So"}  # a function's docstring begins with a verb
PHRASES = re.compile(
    r"\b(so many|the like|dearer|reckon\w*|tells? of|told of|likewise|the same of|mend(s|ed|ing)?|one'?s own)\b",
    re.IGNORECASE,
)
ENTRY = re.compile(r"^\s+\w+: (Of|What|Whether|How|Those|Likewise|The same|As)\b", re.MULTILINE)
PARTICIPLES = {"told", "found", "held", "kept", "given", "made", "wanted", "own", "alike", "apart", "together"}
DIALECT = re.compile(r"_(told|tells|mend\w*|alike|meant|dearer|ones_own|so_many)(_|$)")  # in names of tests
PUBLIC = {  # names that users' code and files have
    "mpitrain/comm/compression/topk.py": {"kept"},
    "mpitrain/data/dataset.py": {"apart"},
    "mpitrain/data/format.py": {"given"},
    "mpitrain/data/mix.py": {"apart"},
    "mpitrain/data/prepare.py": {"Found"},
    "mpitrain/data/sources/__init__.py": {"found", "Found"},
    "mpitrain/models/gpt.py": {"apart"},
    "mpitrain/tensor/axis.py": {"own"},
    "mpitrain/tensor/plan.py": {"given"},
    "mpitrain/trainer/modes/groups.py": {"together"},
    "mpitrain/trainer/run.py": {"together", "own"},
    "benchmarks/runner/report.py": {"wanted"},
}
OUR_WORDS = 8  # entries of the glossary that no other project has
MISSING = 0.05  # of the public functions of two or more arguments

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    pairs = []
    with without_collecting():
        for package in ("mpitrain", "benchmarks", "docs", "examples"):
            for path in sorted((ROOT / package).rglob("*.py")):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                pairs += [(path.relative_to(ROOT), node) for node in ast.walk(tree)]
    return pairs


@cache
def documented() -> list[tuple[str, ast.Module | ast.ClassDef | Function, str]]:
    return [
        (f"{path}:{getattr(node, 'lineno', 1)}", node, text)
        for path, node in nodes()
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node))
    ]


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = []
    for place, node, text in documented():
        is_property = isinstance(node, Function) and any("property" in ast.unparse(d) for d in node.decorator_list)
        banned = FIRST_WORDS | (NO_VERBS if isinstance(node, Function) and not is_property else set())
        if (first := text.split(maxsplit=1)[0].strip(",.:")) in banned:
            wrong.append(f"{place}: {first}")
    assert not wrong


def test_entries_of_docstrings_begin_with_what_they_name():
    assert not [f"{place}: {match[0].strip()}" for place, _, text in documented() for match in ENTRY.finditer(text)]


def test_docstrings_are_free_of_phrases_of_our_own():
    assert not [f"{place}: {match[0]}" for place, _, text in documented() for match in PHRASES.finditer(text)]


def test_public_functions_explain_their_arguments():
    several, missing = 0, []
    for place, node, text in documented():
        if not isinstance(node, Function) or node.name.startswith("_") or place.startswith(("docs", "examples")):
            continue
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len([name for name in arguments if name not in ("self", "cls")]) >= 2:
            several += 1
            missing += [f"{place}: {node.name}"] if "Args:" not in text else []
    assert len(missing) <= MISSING * several, f"{len(missing)} of {several}: {missing}"


def defined(node: ast.AST) -> list[str]:
    """Names that a node gives to something: a class, a function, its parameters, a variable, an attribute."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.id if isinstance(node, ast.Name) else node.attr]
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.name] if isinstance(node, ast.ClassDef | Function) else []


def test_names_are_nouns_and_verbs():
    wrong = [
        f"{path}:{getattr(node, 'lineno', 1)}: {name}"
        for path, node in nodes()
        for name in defined(node)
        if name.strip("_").lower() in PARTICIPLES and name not in PUBLIC.get(str(path), ())
    ]
    assert not wrong


def test_messages_are_free_of_phrases_of_our_own():
    texts = [(path, node) for path, node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [f"{path}:{node.lineno}: {match[0]}" for path, node in texts if (match := PHRASES.search(node.value))]


def test_pages_are_free_of_phrases_of_our_own():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "setup.cfg")]
    for folder, endings in (("docs", (".md",)), ("examples", (".py", ".md")), ("jobs", ("", ".sh", ".pbs", ".sbatch"))):
        pages += [path for path in (ROOT / folder).iterdir() if path.is_file() and path.suffix in endings]
    matches = [(path, number, PHRASES.search(line)) for path in pages for number, line in enumerate(path.open(), 1)]
    assert not [f"{path.relative_to(ROOT)}:{number}: {match[0]}" for path, number, match in matches if match]


def test_the_glossary_has_few_words_of_our_own():
    assert (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").count("** (ours)") <= OUR_WORDS


def test_names_of_tests_are_plain():
    names = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function) and node.name.startswith("test_")
    ]
    assert not [name for name in names if DIALECT.search(name)]
