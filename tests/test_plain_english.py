"""Mechanical checks of docstrings and names. Whether a reader understands them, no program can tell."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from support import ROOT

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
PHRASES = re.compile(r"\b(so many|the like|dearer|reckon\w*|tells? of|told of|likewise|the same of)\b", re.IGNORECASE)
ENTRY = re.compile(r"^\s+\w+: (Of|What|Whether|How|Those|Likewise|The same|As)\b", re.MULTILINE)
PARTICIPLES = {"told", "found", "held", "kept", "given", "made", "wanted", "own", "alike", "apart", "together"}
MISSING = 0.05  # of the public functions of two or more arguments

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    pairs = []
    for package in ("mpitrain", "benchmarks"):
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
        if not isinstance(node, Function) or node.name.startswith("_"):
            continue
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len([name for name in arguments if name not in ("self", "cls")]) >= 2:
            several += 1
            missing += [f"{place}: {node.name}"] if "Args:" not in text else []
    assert len(missing) <= MISSING * several, f"{len(missing)} of {several}: {missing}"


def test_local_variables_are_nouns():
    wrong = []
    for path, function in nodes():
        if not isinstance(function, Function):
            continue
        arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
        for node in (each for statement in function.body for each in ast.walk(statement)):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if stored and node.id.strip("_") in PARTICIPLES - arguments:
                wrong.append(f"{path}:{node.lineno}: {node.id}")
    assert not wrong
