# Shared by one_node.sbatch and many_nodes.sbatch, which source it with their own name and arguments.

usage() {
    local strategies recipes
    strategies=$(cd accelerate_configs && echo *.yaml)
    recipes=$(echo recipes/*.yaml)
    cat >&2 <<END
usage: sbatch $1 STRATEGY RECIPE [--section.key VALUE ...]
STRATEGY: ${strategies//.yaml/}
RECIPE: $recipes
Ask the cluster first (this starts nothing), then submit without --test-only:
  sbatch --test-only $1 fsdp2 recipes/llama_125m.yaml
Options of sbatch override the #SBATCH lines:
  sbatch --partition P --account A --gpus-per-node 4 --cpus-per-task 32 $1 fsdp2 recipes/llama_125m.yaml
Load modules before launch_and_requeue, at the end of the script.
END
}

script=$1 strategy=${2:-} recipe=${3:-} python=${PYTHON:-.venv/bin/python}
problems=()
if [ -z "$strategy" ]; then
    problems+=("STRATEGY is missing")
elif [ ! -f "accelerate_configs/$strategy.yaml" ]; then
    problems+=("STRATEGY $strategy: there is no accelerate_configs/$strategy.yaml")
fi
if [ -z "$recipe" ]; then
    problems+=("RECIPE is missing")
elif [ ! -f "$recipe" ]; then
    problems+=("RECIPE $recipe: no such file")
fi
if [ -z "${PYTHON:-}" ] && [ ! -x "$python" ]; then
    problems+=("$python is missing: run make install, or name the Python of another environment: PYTHON=python sbatch ...")
fi
if [ -z "${SLURM_JOB_ID:-}" ]; then
    if [ ${#problems[@]} -eq 0 ]; then
        echo "$script: the arguments are right, but nothing was started: submit the script with sbatch" >&2
        exit 2
    fi
elif [ -z "${SLURM_GPUS_ON_NODE:-}" ]; then
    problems+=("the job has no GPUs: sbatch --gpus-per-node N")
fi
if [ ${#problems[@]} -gt 0 ]; then
    usage "$script"
    printf '%s\n' "${problems[@]}" >&2
    exit 2
fi

# srun doesn't inherit --cpus-per-task from sbatch. Without this, a task has one CPU.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Seconds from the first signal until torchrun kills its workers. Its default of 30 is too short for a large checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270
# The port depends on the job's ID, so that two jobs can share a machine.
port=$((20000 + SLURM_JOB_ID % 20000))
# One task of a job array has the array's own ID as its job ID, which would mean all tasks.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

save_and_end() {
    # srun doesn't forward SIGTERM; it kills its tasks. scancel signals only the tasks that already run, and reports
    # nothing about the others. A second signal would end training without its checkpoint. So wait up to a minute.
    local tries
    for ((tries = 0; tries < 60; tries++)); do
        scontrol listpids "$SLURM_JOB_ID" "$SLURMD_NODENAME" 2>/dev/null | grep -qE " $SLURM_JOB_ID +[0-9]" && break
        sleep 1
    done
    scancel --signal=TERM "$job"
}

launch_and_requeue() {
    # SLURM sends SIGUSR1 to this script only, five minutes before the time limit. A trap that starts a process before
    # $! is read would change $!.
    local time_is_up=no status launcher
    trap 'time_is_up=early' USR1
    "$@" &
    launcher=$!
    trap '[ "$time_is_up" = yes ] || { time_is_up=yes; save_and_end & }' USR1
    [ "$time_is_up" != early ] || kill -USR1 $$
    while :; do  # wait returns for a signal as well as for the end
        wait "$launcher" && status=0 || status=$?
        kill -0 "$launcher" 2>/dev/null || break
    done
    # docs/failures.md lists the exit statuses.
    case $status in
        75) scontrol requeue "$job" ;;             # saved after a signal
        0 | 2 | 16 | 17 | 18 | 130) ;;             # would end the same way again
        *) [ "$time_is_up" = no ] || scontrol requeue "$job" ;;
    esac
    exit "$status"
}
