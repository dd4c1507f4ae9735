"""Damaged files of every kind: each is refused in one line or read, within 2 s of CPU time and 512 MiB."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import struct
import tarfile
import traceback
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fuzzed_files import KINDS, FileKind, damaged
from support import PATIENCE, little_memory

from mpitrain.config import deepspeed
from mpitrain.config.settings import Config
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.errors import MpitrainError, message_of
from mpitrain.monitor.report.reading import read_run
from mpitrain.monitor.run_files import summary
from mpitrain.monitor.watched import WatchedRun
from mpitrain.storage.disk import read_plain

SECONDS, MEMORY = 2 * PATIENCE, 512 << 20
SEED = 27


def outcome(kind, folder, right):
    """Read a folder in a forked process; return what went wrong, or an empty string."""
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
                content = str(kind.read(folder))
            if kind.exact and content != right:
                problem = f"read as something else: {content:.300}"
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
    """Read `cases` damaged files; return the problems by case."""
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


def list_problems(problems):
    return "\n\n".join(f"{case}: {text}" for case, text in list(problems.items())[:12])


def test_damaged_files_of_every_kind_are_refused_in_one_line_or_read(tmp_path):
    problems = run(tmp_path, 104, KINDS)
    assert not problems, f"{len(problems)} of 104:\n{list_problems(problems)}"


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_two_thousand_damaged_files_are_refused_in_one_line_or_read(tmp_path):
    problems = run(tmp_path, 2000, KINDS)
    assert not problems, f"{len(problems)} of 2,000:\n{list_problems(problems)}"


MIB = 1 << 20


def packed(start: bytes, filling: bytes, mib: int) -> bytes:
    """Return a gzip file of `start` and `mib` MiB of filling, built quickly by repeating a compressed member."""
    return gzip.compress(start) + gzip.compress(filling * (MIB // len(filling))) * mib


def header(kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("a.png")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def sparse(path: Path, start: bytes, size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(start)
    os.truncate(path, size)


def source(name: str, content: bytes, **options) -> FileKind:
    def read(folder):
        (folder / name).write_bytes(content)
        return prepare([str(folder / name)], folder / "out", options=PrepareOptions(**options)).splits

    return FileKind(lambda folder: [], read, exact=True)


def read_by(read) -> FileKind:
    return FileKind(lambda folder: [], read, exact=True)


def endless_metrics(reader):
    def read(folder):
        step = b'{"step": 1, "loss": 1.0, "step_s": 0.1, "samples": 1, "tokens": 0, "world_size": 1}\n'
        sparse(folder / "run/metrics.jsonl", step, 20 << 30)
        return reader(folder / "run")

    return read


def written(name: str, content: str, reader):
    def read(folder):
        (folder / name).write_text(content)
        return reader(folder / name)

    return read


MANY_KEYS = {f"train_batch{number}": 1 for number in range(9000)}


def deepspeed_of(path):
    return deepspeed.read_deepspeed(deepspeed.read_json(path), 2)


def configured(path):
    return Config.from_args([str(path)])


def preset(path):
    return Config.from_dict({"model": {"preset": str(path)}})


_NUMBERS = struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", 8, 2**63 - 4, 0, 1)
PAX = header(tarfile.XHDTYPE, 14) + b"14 path=abcde\n" + bytes(498)
BOMBS = {
    "long name": source("t.tar.gz", packed(header(tarfile.GNUTYPE_LONGNAME, 3 << 30), b"x", 1200)),
    "PAX header": source("t.tar.gz", packed(header(tarfile.XHDTYPE, 3 << 30), b"x", 1200)),
    "PAX headers in a row": source("t.tar.gz", gzip.compress(PAX * 2000)),
    "line of JSON": source("d.jsonl.gz", packed(b'{"text": "', b"x", 1200)),
    "element of JSON": source("d.json.gz", packed(b'[{"text": "', b"x", 1200)),
    "broken element": source("d.json.gz", packed(b'[{"text": "a"}, oops', b" 1,", 1200)),
    "line of CSV": source("t.csv.gz", packed(b"1,2\n3,", b"4", 1200)),
    "row of many lines": source("t.csv.gz", packed(b'1,2\n3,"', b"4\n", 1200)),
    "text": source("a.txt.gz", packed(b"x", b"x", 400), pack=64),
    "text without blank lines": source("a.txt.gz", packed(b"x", b"x", 400), pack=64, blank_lines=True),
    "Megatron offsets": FileKind(lambda folder: [], lambda folder: [
        (folder / "c.bin").write_bytes(bytes(64)), (folder / "c.idx").write_bytes(b"MMIDIDX\0\0" + _NUMBERS),
        prepare([str(folder / "c.idx")], folder / "out")], exact=True),
    "metrics, reported": read_by(endless_metrics(summary)),
    "metrics, charted": read_by(endless_metrics(read_run)),
    "DeepSpeed strings": read_by(written("d.json", '"\\' * 50_000, deepspeed.read_json)),
    "DeepSpeed comments": read_by(written("d.json", "/*" * 50_000, deepspeed.read_json)),
    "DeepSpeed keys": FileKind(lambda folder: [], written("d.json", json.dumps(MANY_KEYS), deepspeed_of)),
    "TOML key": read_by(written("c.toml", ".".join("a" * 50_000) + " = 1\n", configured)),
    "preset": read_by(written("config.json", '{"model_type": ["gpt2"]}', preset)),
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_cannot_use_much_memory_or_time(tmp_path, case):
    r"""Check that each file is refused: none reads as "\0"."""
    assert not outcome(BOMBS[case], tmp_path, "\0")


def test_reading_endless_metrics_and_small_files_uses_little_memory(tmp_path):
    def watch(folder):
        watched = WatchedRun(folder)
        for _ in range(3):
            watched.read()
        return watched.step, watched.steps.damaged

    assert not outcome(read_by(endless_metrics(watch)), tmp_path, "(0, 0)")
    small = written("small", "x" * 20_000, lambda path: len(read_plain(path, 1 << 30)))
    assert not outcome(read_by(small), tmp_path, "20000")
