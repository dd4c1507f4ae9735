"""CI runs every test: a third of the campaign and a slice of the longest for each commit, and on slow machines less."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter

import pytest
from support import ROOT, in_slice


@pytest.mark.parametrize("parts", [1, 4])
def test_consecutive_commits_run_everything(tmp_path, parts):
    for folder in (".ci", "tests/cluster"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for name, text in (("tests/run.sh", "echo asked: $*"), ("tests/cluster/install.sh", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def said(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout

    said("git", "init", "-q")
    run = [Counter[str]() for _ in range(3)]
    for number in range(10 * parts):
        me = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        said("git", *me, "commit", "-q", "--allow-empty", "-m", f"commit {number}")
        lines = said("env", f"PARTS={parts}", ".ci/run").splitlines()
        for counts, line in zip(run, lines, strict=True):
            counts.update(re.findall(r"^asked: (.*)$", line))
    for options, counts, each in zip(("--part ", "--campaign --part ", "--slice "), run, (1, 3, 10), strict=True):
        assert counts.keys() == {f"{options}{k}/{each * parts}" for k in range(each * parts)}
        names = [f"tests/test_{number}.py::test[{number}]" for number in range(20 * each * parts)]
        shares = Counter(part for name in names for part in counts if in_slice(name, part.split()[-1]))
        assert sum(shares.values()) == len(names) and min(shares.values()) > 5


def test_a_part_is_some_of_the_files_in_every_process(forked):
    found: list[str] = []
    for k in range(3):
        options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--part", f"{k}/3", str(ROOT / "tests/layout")]
        done = forked.run("-c", f"import pytest, sys; sys.exit(pytest.main({options}))", cwd=ROOT)
        assert done.returncode in (0, 5), done.stdout + done.stderr
        found += sorted(set(re.findall(r"^(tests/\S+)::", done.stdout, re.MULTILINE)))
    assert sorted(found) == sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/layout").glob("test_*.py"))
