# Functions that the batch scripts share; source this file. The functions stand in the order in which they are called.
# The caller sets `job`, the batch system's name of the job, which stays the same after each requeue; `nodes`; `ranks`;
# `each`, the ranks of a node; `cores`, the cores of a rank; `other_launcher`, the command that starts ranks if the MPI
# is not Open MPI; and optionally `host_options` for Open MPI.
#   SITE=FILE           file to source first, with `module load` and anything else that the cluster needs (default:
#                       site.sh beside this file, if it exists); it may set the other variables
#   VENV=DIR            Python environment (default: .venv beside jobs/, else the python on the PATH)
#   LAUNCH="COMMAND"    command that starts the ranks, for an MPI that is not recognised
#   ATTEMPTS=3          number of attempts in a row from the same checkpoint, after which the job gives up

say() { echo "$(date '+%F %T') $*"; }

activate() { # activate ROOT
    local site=${SITE:-$jobs/site.sh} venv
    if [ -e "$site" ]; then
        set +u # modules of clusters read variables that are not set
        . "$site" || say "$site ended with exit code $?; continuing"
        set -u
    elif [ -n "${SITE:-}" ]; then
        say "SITE is $SITE, which does not exist"
        exit 1
    fi
    venv=${VENV:-$1/.venv}
    if [ -e "$venv/bin/activate" ]; then
        . "$venv/bin/activate"
    fi
    export OMP_NUM_THREADS=$cores
}

find_run() { # find_run ARGUMENTS OF THE TRAINER...: sets run, its folder, and steps; ends the job with 2 if they are wrong
    local settings
    settings=$(python -c '
import sys
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
try:
    config = Config.from_args(sys.argv[1:])
except InputError as error:
    print(f"mpitrain: {error}", file=sys.stderr)
    sys.exit(2)
print(config.train.steps, config.run.dir)' "$@") || exit
    read -r steps run <<<"$settings"
    run=${run:-runs/job-$job}
}

newest_step() { # the step of the newest checkpoint, 0 without one
    local newest
    newest=$(ls "$run/checkpoints" 2>/dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1)
    echo $((10#0${newest#step-}))
}

count_attempt() { # notes this attempt in RUN/attempts; ends the job with 1 after too many from the same checkpoint
    local step fruitless
    step=$(newest_step)
    mkdir -p "$run"
    fruitless=$(tac "$run/attempts" 2>/dev/null |
        awk -v job="$job" -v step="$step" '$1 != job || $2 != step { exit } { n++ } END { print n + 0 }')
    if [ "$fruitless" -ge "${ATTEMPTS:-3}" ]; then
        say "giving up: $fruitless attempts in a row did not get past step $step; see $run/logs, then submit again"
        exit 1
    fi
    echo "$job $step $(date '+%FT%T') $nodes nodes $ranks ranks" >>"$run/attempts"
    say "job $job in $run: from step $step with $ranks ranks on $nodes nodes, $cores cores each"
}

cores_of_this_node() {
    cat /sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list 2>/dev/null | sort -u | wc -l
}

choose_launcher() { # sets launcher: the MPI that mpi4py has decides, with its binding told
    local library binding=(--bind-to core) here
    here=$(cores_of_this_node)
    # a count above the number of cores can only be hardware threads
    [ "$here" -eq 0 ] || [ $((each * cores)) -le "$here" ] || binding=(--use-hwthread-cpus --bind-to hwthread)
    library=$(python -c '
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0].strip("\0 "))') || exit 1
    case ${LAUNCH:+given}$library in
    given*) read -ra launcher <<<"$LAUNCH" ;;
    *"Open MPI"*) # its mpirun finds the nodes by itself; USR1 sent to it reaches the ranks
        launcher=(mpirun -n "$ranks" "${host_options[@]+"${host_options[@]}"}" --map-by "ppr:$each:node:PE=$cores" "${binding[@]}" --report-bindings)
        [ "$(id -u)" = 0 ] && launcher+=(--allow-run-as-root)
        ;;
    *) launcher=("${other_launcher[@]}") ;;
    esac
    say "$library: ${launcher[*]}"
    launcher=("$jobs/shielded" "${launcher[@]}")
    if [[ $jobs != *" "* ]]; then # Open MPI takes this apart at spaces
        export PRTE_MCA_prte_launch_agent="$jobs/shielded prted" OMPI_MCA_orte_launch_agent="$jobs/shielded orted"
    fi
}

pass_on() { # pass_on SIGNAL: asks the trainer to save and end; TERM would kill the ranks of Open MPI at once
    say "got $1: asking the job to save"
    asked=yes
    [ -n "${launched:-}" ] && kill -USR1 "$launched" 2>/dev/null
}

run_trainer() { # run_trainer ARGUMENTS...: sets code
    local before
    before=$(newest_step)
    "${launcher[@]}" python -m mpitrain.train "$@" --run.dir "$run" &
    launched=$!
    code=0
    while kill -0 "$launched" 2>/dev/null; do
        wait "$launched" # returns early, above 128, when a signal is passed on
        code=$?
    done
    local remembered=0
    wait "$launched" 2>/dev/null || remembered=$? # of a job that ended just as a signal came
    [ $remembered -eq 127 ] || code=$remembered
    if [ $code -eq 0 ] && [ "$(newest_step)" -lt "$steps" ]; then
        say "the launcher reports success, but step $steps was not reached" # mpirun does, when it loses a node
        code=1
        [ -n "${asked:-}" ] && [ "$(newest_step)" -gt "$before" ] && code=75 # or is ended as the ranks have saved
    elif [ $code -eq 143 ] && [ "$(newest_step)" -gt "$before" ]; then
        code=75 # exit code of the rank that ended first; srun then ends the others and reports it
    elif [ $code -eq 137 ] && [ "$(newest_step)" -ge "$steps" ]; then
        say "the launcher was ended after the last step" # by the ranks: it cannot end itself when it has lost a node
        code=0
    fi
    case $code in
    0 | 2 | 75) ;;
    *) python -m mpitrain.doctor --killed "$run" || true ;; # explains a kill because memory was full
    esac
}

verdict() { # what the trainer's exit code means
    case $1 in
    0) echo "done" ;;
    2) echo "wrong configuration or data; the job is not started again" ;;
    75) echo "saved at step $(newest_step), to be started again" ;;
    *) echo "failed with exit code $1 at step $(newest_step)" ;;
    esac
}
