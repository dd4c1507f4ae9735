"""CI runs every test that is marked full, a slice of them for each commit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter

from support import ROOT, in_slice


def test_ten_commits_run_every_test_marked_full(tmp_path):
    for folder in (".ci", "tests/cluster"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for name, text in (("tests/run.sh", "echo asked: $*"), ("tests/cluster/install.sh", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def said(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout

    said("git", "init", "-q")
    run = Counter[str]()
    for number in range(10):
        me = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        said("git", *me, "commit", "-q", "--allow-empty", "-m", f"commit {number}")
        first, campaign, part = said(".ci/run").splitlines()
        assert (first, campaign) == ("asked:", "asked: --campaign")
        run.update(re.findall(r"^asked: --slice (\d/10)$", part))
    assert run == Counter(f"{number}/10" for number in range(10))
    names = [f"tests/test_{number}.py::test[{number}]" for number in range(200)]
    parts = Counter(part for name in names for part in run if in_slice(name, part))
    assert sum(parts.values()) == 200 and min(parts.values()) > 5
