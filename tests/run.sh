#!/usr/bin/env bash
# Runs the whole suite: lint and types; the rank tests under mpirun at 1, 2, 3, 4 and 8 ranks (and those that depend on
# the MPI under the other MPI, too); and the serial tests, which start mpirun themselves. The serial tests run in two
# halves at the same time, because they spend much of their time waiting.
#   tests/run.sh [--campaign | --full | --slice K/N] [--part K/N] [--sizes "2 3"] [--no-serial] [PYTEST ARGUMENTS...]
#   --campaign     only the long tests: kills, clusters; one of each kind
#   --full         the long tests in all their cases: hours, for people
#   --slice K/N    the K-th of N parts of the tests that --full adds, K from 0; what CI runs one of for each commit
#   --part K/N     of everything selected, only the K-th of N parts of the files, K from 0
#   TESTS_UNTIL=SECONDS   time of `date +%s` after which no size of ranks and no serial tests begin, for CI on slow machines
#   tests/run.sh --sizes 3 --no-serial tests/comm/test_operations.py      one file at 3 ranks
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
long= options=() sizes="1 2 3 4 8" serial=yes
while [ $# -gt 0 ]; do
    case $1 in
    --campaign | --full) long=${1#--} options+=("$1") sizes= ;;
    --slice) long="slice $2" options+=("$1" "$2") sizes= && shift ;;
    --part) options+=("$1" "$2") && shift ;;
    --sizes) sizes=$2 && shift ;;
    --no-serial) serial= ;;
    *) break ;;
    esac
    shift
done
targets=("$@") all=
[ ${#targets[@]} -gt 0 ] || targets=(tests) all=yes

mpi=${MPI:-openmpi}
jobs/setup.sh "$mpi" test || exit 1
. jobs/mpirun.sh
export OMP_NUM_THREADS=1 MPITRAIN_TESTS=$root/.tests
unset PYTHONDONTWRITEBYTECODE # else each process compiles the package, and pytest its tests, anew
rm -rf "$MPITRAIN_TESTS" && mkdir -p "$MPITRAIN_TESTS"
failed=0
without=(-p no:hypothesispytest -p no:anyio) # on ranks: the first imports all of Hypothesis at the end, used or not

python=python
fork_ranks() { # from now on, ranks are forked from a process that has imported torch; it ends with this script
    exec 9> >(exec python tests/warm.py >"$MPITRAIN_TESTS/forked-python" 2>"$MPITRAIN_TESTS/forked-python.log")
    for _ in $(seq 600); do
        sleep 0.1
        if [ -s "$MPITRAIN_TESTS/forked-python" ]; then
            python=$(cat "$MPITRAIN_TESTS/forked-python")
            return
        fi
    done
}

in_time() { # in_time WHAT: whether it may still begin
    [ -z "${TESTS_UNTIL:-}" ] || [ "$(date +%s)" -lt "$TESTS_UNTIL" ] || {
        echo "== not run, because this machine is too slow: $1"
        return 1
    }
}

at_ranks() { # at_ranks SIZE LABEL COMMAND...: the tests marked for SIZE ranks, started by COMMAND
    local size=$1 label=$2 said=$MPITRAIN_TESTS/$2-$1
    shift 2
    in_time "$size rank(s), $label" || return 0
    echo "== $size rank(s), $label"
    MPITRAIN_TEST_RANKS=$size MPITRAIN_TEST_LABEL=$label timeout -k 10 3600 "$@" -n "$size" \
        tests/rank.sh "$python" -m pytest -q --color=no --capture=sys "${without[@]}" --only-mpi ${options[@]+"${options[@]}"} "${targets[@]}" \
        > >(tee "$said-rank-0.log") 2>&1
    local code=$?
    if [ $code -ne 0 ] && [ $code -ne 5 ]; then # 5: no test for this size
        failed=1
        if [ ! -e "$said.counts" ]; then # it was cut off
            echo 0 1 0 >"$said.counts"
            tail -n 40 "$said"-rank-*.log >"$said.failed"
        fi
    fi
}

serial_tests() { # serial_tests LABEL PYTEST ARGUMENTS...
    local label=$1
    shift
    MPITRAIN_TEST_LABEL=$label python -m pytest -q --color=no ${options[@]+"${options[@]}"} "$@"
    local code=$?
    [ $code -eq 0 ] || [ $code -eq 5 ]
}

in_two_halves() { # in_two_halves PATHS...: these in the background, with what they say kept, beside all but ${alone[@]}
    local log=$MPITRAIN_TESTS/beside.log excluded=(${alone[@]+"${alone[@]/#/--ignore=}"}) code=0 beside
    serial_tests beside "$@" ${excluded[@]+"${excluded[@]}"} >"$log" 2>&1 &
    beside=$!
    trap "kill $beside 2>/dev/null" EXIT
    serial_tests serial tests "${@/#/--ignore=}" ${excluded[@]+"${excluded[@]}"} || code=1
    wait $beside || code=1
    cat "$log"
    return $code
}

built() { # waits until the simulated accelerator is there
    [ -z "$building" ] || wait "$building" || failed=1
    building=
}

python -m compileall -q mpitrain tests examples # once, for the processes that start together
PYTHONPATH=tests python -m pretend & # the simulated accelerator
building=$!
linting=
if [ -z "$long" ] && [ -n "$all" ]; then
    {
        [ "$mpi" != openmpi ] || tests/second_mpi.sh mpich # asked for again below, where it may fail
        ruff check . && ruff format --check . && { [ -n "${TESTS_UNTIL:-}" ] || mypy; } # which takes half an hour on such a machine
    } >"$MPITRAIN_TESTS/lint.log" 2>&1 &
    linting=$!
fi
[ "$mpi" != openmpi ] || [ -z "$sizes" ] || fork_ranks
for size in $sizes; do
    [ "$size" = 1 ] || built # one rank takes one core, and leaves the other to these two
    at_ranks "$size" "$mpi" "${MPIRUN[@]}"
    if [ -n "$linting" ]; then
        wait $linting || failed=1
        cat "$MPITRAIN_TESTS/lint.log"
        linting=
    fi
done
built
if [ "$mpi" = openmpi ] && [ "$sizes" = "1 2 3 4 8" ]; then
    # the tests that call MPI, at one size, with the other MPI: its environment borrows everything else from .venv
    (
        tests/second_mpi.sh mpich || exit 1
        PATH=$root/.venv-mpich/bin:$PATH python=python
        if [ -n "$all" ]; then
            targets=(tests/comm --ignore=tests/comm/test_compression.py --ignore=tests/comm/test_block_compression.py
                tests/checkpoint/test_{background_saves,reading_together}.py tests/commands
                tests/backend/test_backend_operations.py tests/horovod_interface/test_horovod_operations.py
                tests/pipe/test_pipe_training.py::test_random_delays_change_nothing
                tests/shard/test_{ddp,initialize}.py tests/train/test_trainer.py)
        fi
        at_ranks 3 mpich mpiexec
        exit $failed
    ) || failed=1
fi
if { [ -n "$serial" ] || [ -n "$long" ]; } && in_time "serial ${long:+($long)}"; then
    echo "== serial ${long:+($long)}"
    alone=()
    if [ -z "$all" ]; then
        serial_tests serial "${targets[@]}" || failed=1
    elif [ -z "$long" ]; then
        in_two_halves tests/{backend,benchmarks,checkpoint,comm,commands,data,inference,models} || failed=1
    else # some compare speeds, or ask how fast a job recovers or trains
        alone=(tests/benchmarks/test_bench_guard.py tests/cluster/test_{link,local_mode,planned_hosts,shrink}.py)
        in_two_halves tests/cluster/test_{dead_workers,kill_campaign,local_disks,several_nodes}.py \
            tests/cluster/test_slurm{,_backend}.py tests/{benchmarks,docs,jobs} || failed=1
        serial_tests alone "${alone[@]}" || failed=1
    fi
    for size in $(cat "$MPITRAIN_TESTS"/long-sizes-* 2>/dev/null | sort -un); do # at which there are long tests of ranks
        at_ranks "$size" "$mpi" "${MPIRUN[@]}"
    done
fi
[ $failed = 0 ] || tail -n +1 "$MPITRAIN_TESTS"/*.failed 2>/dev/null # once more, where nobody has to look for them
[ -z "$long" ] || echo "== $long: $([ $failed = 0 ] && echo passed || echo failed)"
cat "$MPITRAIN_TESTS"/*.counts 2>/dev/null |
    awk -v bad=$failed '{ p += $1; f += $2; s += $3 } END { if (bad && !f) f = 1; print p + 0 " passed, " f + 0 " failed, " s + 0 " skipped" }'
exit $failed
