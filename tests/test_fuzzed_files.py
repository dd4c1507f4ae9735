"""Damaged files of every kind: each is refused in one line or read, within 2 s of CPU time and 512 MiB."""

from __future__ import annotations

import os
import random
import resource
import shutil
import traceback
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fuzzed_files import KINDS, damaged
from support import little_memory

from mpitrain.errors import MpitrainError, message_of

SECONDS, MEMORY = 2, 512 << 20
SEED = 27


def outcome(kind, folder, right):
    """What is wrong with how a process of its own reads a folder, forked from this one; empty where nothing is."""
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS + 1, spent + SECONDS + 1))
        problem = ""
        try:
            with little_memory(MEMORY), np.errstate(all="ignore"):
                found = str(kind.read(folder))
            if kind.exact and found != right:
                problem = f"read as something else: {found:.300}"
        except MpitrainError as error:
            text = message_of(error)
            if "\n" in text or not 10 < len(text) < 4100:
                problem = f"no line: {text!r:.500}"
        except BaseException:
            problem = traceback.format_exc()[-3000:]
        os.write(say, problem.encode(errors="backslashreplace"))
        os._exit(0)
    os.close(say)
    with open(hear, "rb") as file:
        problem = file.read().decode()
    _, status = os.waitpid(child, 0)
    return problem or (f"ended by {os.waitstatus_to_exitcode(status)}" if status else "")


def run(folder: Path, cases: int, names) -> dict[str, str]:
    """The problems of so many damaged files, by case."""
    problems: dict[str, str] = {}
    count = Counter()
    for number, name in enumerate(names):
        kind, home = KINDS[name], folder / str(number)
        home.mkdir()
        files = kind.make(home)
        with np.errstate(all="ignore"):
            right = str(kind.read(home))
        whole = {file: file.read_bytes() for file in files}
        for case in range(cases // len(names) + (number < cases % len(names))):
            chance = random.Random(SEED * 1_000_003 + zlib.crc32(name.encode()) + case)
            file = chance.choice(files)
            file.write_bytes(damaged(whole[file], chance))
            if problem := outcome(kind, home, right):
                problems[f"{name}, case {case}, {file.name}"] = problem
            file.write_bytes(whole[file])
            count[name] += 1
        shutil.rmtree(home)
    assert count.total() == cases
    return problems


def told(problems):
    return "\n\n".join(f"{case}: {text}" for case, text in list(problems.items())[:12])


def test_damaged_files_of_every_kind_are_refused_in_one_line_or_read(tmp_path):
    problems = run(tmp_path, 104, KINDS)
    assert not problems, f"{len(problems)} of 104:\n{told(problems)}"


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_two_thousand_damaged_files_are_refused_in_one_line_or_read(tmp_path):
    problems = run(tmp_path, 2000, KINDS)
    assert not problems, f"{len(problems)} of 2,000:\n{told(problems)}"
