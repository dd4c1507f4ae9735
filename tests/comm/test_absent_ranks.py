"""Ranks that miss the start, or leave while others wait for them, are named within seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
from ranks_apart import TIMEOUT, failed_job, good_job, line
from support import ROOT, clean_environment, job, launcher


@pytest.mark.parametrize(
    ("waits", "code"),
    [
        ("world.all_reduce(x)", 0),
        pytest.param("world.recv(x, 1)", 3, marks=pytest.mark.campaign),
        pytest.param("world.all_reduce(x, async_op=True).wait()", 3, marks=pytest.mark.campaign),
        pytest.param("world.split(0)", 3, marks=pytest.mark.campaign),
        pytest.param("world.irecv(x, 1).wait(timeout=50)", 3, marks=pytest.mark.campaign),
    ],
)
def test_a_rank_that_exits_while_others_wait_is_reported_within_seconds(tmp_path, waits, code):
    program = f"""
        import sys
        from mpitrain.comm import set_timeout
        set_timeout(600)
        half = world.split(world.rank % 2)
        world.all_reduce(x)
        if world.rank == 1:
            sys.exit({code})
        half.barrier()  # of ranks 0 and 2 only
        {waits}  # never completes
        """
    report = failed_job(tmp_path, 3, program, limit=45)
    ended = f"ended with exit code {code} while" if code else "ended while"
    assert report.count(f"rank 1 has left: its Python interpreter {ended}") == 1
    assert re.search(rf"while rank [02] waits for it at {line(tmp_path, '# never completes')} in <module>", report)
    assert "[mpi" not in report.split("mpitrain: ")[1].splitlines()[0]


LATE = {
    "stopped when MPI's library is loaded": """
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
    "hangs in its imports": "time.sleep(60)",
    "stopped before init": "import mpitrain.comm.job.mpi; os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize(
    "kind",
    [
        "stopped when MPI's library is loaded",
        *(pytest.param(kind, marks=pytest.mark.campaign) for kind in list(LATE)[1:]),
    ],
)
def test_a_rank_that_never_starts_is_reported_with_its_process_id(tmp_path, kind):
    script = tmp_path / "job.py"
    late = textwrap.indent(textwrap.dedent(LATE[kind]), "    ")
    script.write_text(
        "import os, signal, time\n"
        "if (os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('PMI_RANK')) == '1':\n"
        f"    print('process', os.getpid(), flush=True)\n{late}\n"
        "import mpitrain as mt\n"
        f"mt.init(timeout={TIMEOUT})\n"
    )
    result = job(3, [sys.executable, str(script)], timeout=60, PYTHONPATH=str(ROOT), MPITRAIN_START_TIMEOUT="8")
    assert result.returncode != 0
    process = result.stdout.split("process ")[1].split()[0]
    problem = "has not reached it yet" if "imports" in kind else "is stopped"
    messages = [line for line in result.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert 1 <= len(messages) <= 2  # rank 2 reports a second after rank 0, if mpirun has not ended it by then
    for message in messages:
        assert "not all 3 ranks reached the start of MPI in 8 s" in message
        assert re.search(rf": rank 1 \(python\S*, process {process} on \S+\) {problem}$", message)


@pytest.mark.parametrize("point", ["its imports", "init"])
def test_ulfm_reports_a_rank_killed_at_startup_with_its_host(tmp_path, point):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal\n"
        f"if {point!r} == 'init':\n"
        "    import mpitrain.comm.job.mpi\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "import mpitrain as mt\n"
        "mt.init(timeout=600)\n"
    )
    mpirun = launcher(3)
    if "mpirun" not in mpirun[0]:
        pytest.skip("this MPI ends the job itself")
    command = [mpirun[0], "--with-ft", "ulfm", *mpirun[1:], sys.executable, str(script)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=clean_environment(PYTHONPATH=str(ROOT))
    )
    assert result.returncode != 0 and "Traceback" not in result.stderr, result.stderr
    messages = [text for text in result.stderr.splitlines() if text.startswith("mpitrain: ")]
    assert messages, result.stderr
    ended = rf"rank [02]: .*rank 1 .*of 3 ended \(possibly killed\) on {os.uname().nodename} "
    assert all(re.search(ended, text) for text in messages)


def test_a_program_may_finalize_mpi_itself_and_continue(tmp_path):
    program = """
        from mpi4py import MPI
        work = world.all_reduce(x, async_op=True)
        work.wait()
        MPI.Finalize()
        time.sleep(3)  # the watchdog looks every half second
        print("alive", flush=True)
        """
    good_job(tmp_path, 2, program, MPITRAIN_SPARE_CORES="1")


def test_ranks_that_are_done_may_exit_before_the_others(tmp_path):
    good_job(
        tmp_path,
        3,
        """
        import sys
        from mpitrain.comm import set_timeout
        set_timeout(600)
        rest = world.split(0 if world.rank else None)
        world.broadcast(x, 0)
        if world.rank:
            if world.rank == 1:
                time.sleep(2)
            rest.all_reduce(x, async_op=True).wait()  # without rank 0, which has exited
            sent = world.isend(x, 3 - world.rank)
            world.recv(torch.empty(4, 256), 3 - world.rank)
            sent.wait()
        print("done", flush=True)
        if world.rank == 1:
            time.sleep(2)
        sys.exit(0)
        """,
    )
