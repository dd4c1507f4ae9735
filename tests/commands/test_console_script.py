"""The command `mpitrain`: its commands are those of `python -m`, and its completion, schema and job scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from support import ROOT, job, one_line

import mpitrain
from mpitrain import jobs
from mpitrain.__main__ import COMMANDS
from mpitrain.config import schema

PACKAGE = ROOT / "mpitrain"
HIDDEN = {"bench", "mpitrain"}  # a removed command; the command itself
CONSOLE = [sys.executable, "-m", "mpitrain"]
# the shell function of the script completes the last word of a command line: bash -c TRY SCRIPT WORDS...
TRY = """
source "$0"
COMP_WORDS=(mpitrain "$@") COMP_CWORD=$# COMP_LINE="mpitrain $*" COMP_POINT=1000
_shtab_mpitrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_it_offers_every_command_of_the_package(forked):
    modules = [*PACKAGE.glob("*.py"), *PACKAGE.rglob("__main__.py")]
    runnable = {p for p in modules if '__name__ == "__main__"' in p.read_text()}
    assert {p.parent.name if p.name == "__main__.py" else p.stem for p in runnable} - HIDDEN == COMMANDS.keys()
    shown = forked.run("__main__", "--help").stdout
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def test_a_command_runs_as_with_python_m(tmp_path, forked):
    (tmp_path / "words.txt").write_text("some words to learn from\n" * 50)
    done = forked.run("__main__", "data", "prepare", "words.txt", "--out", "words", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "words").is_dir(), done.stderr
    code = "import mpitrain.__main__ as m, sys; sys.argv = ['/bin/mpitrain', 'report', '--version']; m.main()"
    done = forked.run("-c", code, cwd=tmp_path)  # as the installed script calls it
    assert (done.returncode, done.stdout) == (0, f"mpitrain {mpitrain.__version__}\n"), done.stderr
    one_line(forked.run("__main__", "train", "--train.stpes", "3"), "unknown key 'train.stpes'", "train.steps")
    one_line(forked.run("__main__", "trian"), "no command 'trian'", "did you mean 'train'?")
    one_line(forked.run("__main__", "--train.steps", "3"), "'--train.steps 3' is not understood", "--help")


def test_ranks_train_by_it(tmp_path):
    settings = ["--data.path", "digits", "--model.name", "mlp", "--train.steps", "2", "--run.dir", "run"]
    done = warm.job(2, [*CONSOLE, "train", *settings], cwd=tmp_path)
    assert done.returncode == 0 and "done at step 2 of 2" in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def script(tmp_path_factory, forked) -> Path:
    path = tmp_path_factory.mktemp("completion") / "mpitrain.bash"
    done = forked.run("__main__", "--print-completion", "bash")
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "--parallel.zer"], {"--parallel.zero"}),
        (["train", "--train.precision", ""], {"fp32", "bf16", "fp16"}),
        (["train", "--as-r"], {"--as-rank"}),
        (["data", ""], {"prepare", "tokenizer", "info"}),
        (["checkpoint", "export", "--form"], {"--format"}),
        (["jobs", "--copy", ""], {"slurm", "pbs"}),
        (["doctor", "--kil"], {"--killed"}),
        (["report", "CHANGE"], {"CHANGELOG.md"}),
    ],
)
def test_bash_completes_commands_options_values_and_files(script, words, expected):
    done = subprocess.run(
        ["bash", "-c", TRY, str(script), *words], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert set(done.stdout.split()) == expected, done.stderr


def test_scripts_for_other_shells_parse(tmp_path, forked):
    for shell in ("zsh", "tcsh"):
        done = forked.run("__main__", "--print-completion", shell)
        assert done.returncode == 0 and "--parallel.zero" in done.stdout, done.stderr
        if shell == "zsh" and shutil.which("zsh"):
            (tmp_path / "script").write_text(done.stdout)
            subprocess.run(["zsh", "-n", str(tmp_path / "script")], check=True, timeout=20)
    one_line(forked.run("__main__", "--print-completion", "cmd"), "takes one of bash, zsh, tcsh")


def test_completion_without_shtab_says_what_to_install(tmp_path):
    (tmp_path / "shtab.py").write_text("raise ImportError\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = job(0, [*CONSOLE, "--print-completion", "bash"], PYTHONPATH=path)
    one_line(done, "shtab", "mpitrain[completion]")


def test_the_schema_is_printed(forked):
    assert json.loads(forked.run("__main__", "--print-schema").stdout) == schema.schema()


def test_job_scripts_are_copied_and_no_file_is_overwritten(tmp_path, forked):
    for kind, names in jobs.KINDS.items():
        done = forked.run("__main__", "jobs", "--copy", kind, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for name in names:
            copy, original = tmp_path / "jobs" / name, ROOT / "jobs" / name
            assert copy.read_bytes() == original.read_bytes()
            assert os.access(copy, os.X_OK) or not os.access(original, os.X_OK)
    mine = tmp_path / "jobs/batch.sh"
    mine.write_text("of a user")
    (tmp_path / "jobs/train.pbs").unlink()
    one_line(forked.run("__main__", "jobs", "--copy", "pbs", cwd=tmp_path), "batch.sh exists already and differs")
    assert mine.read_text() == "of a user" and not (tmp_path / "jobs/train.pbs").exists()


def test_every_job_script_for_a_batch_system_can_be_copied():
    for_clones = {"local.sh", "mpirun.sh", "setup.sh", "site.sh"}  # they install the clone, and are settings of a site
    offered = {name for names in jobs.KINDS.values() for name in names}
    assert {path.name for path in (ROOT / "jobs").iterdir()} - for_clones == offered
