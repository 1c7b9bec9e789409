#!/bin/bash
# One experiment, or one sweep, on several nodes of a Slurm cluster:
#
#   sbatch docs/cluster/slurm.sh experiment.yaml results/my-run
#   sbatch docs/cluster/slurm.sh sweep.yaml results/my-sweep
#   sbatch --gpus-per-node=2 docs/cluster/slurm.sh experiment.yaml results/my-run
#
# A file with a section `sweep:` is swept. Starts Ray on every node of the job, runs fedsweep on the first, and stops Ray
# again. What is unfinished in the output folder is gone on with, so the same line may be submitted again after a time
# limit: five minutes before it fedsweep is told (USR1), writes a checkpoint and ends.
#
# Needs on every node: the same Python environment (here .venv in the folder of the submission, or FEDSWEEP_VENV) and
# the same home folder, where Ray's token lies. The data set is read, and the
# output folder written, by the first node alone. Modules of your own are found in the folder of the submission.
#SBATCH --job-name=fedsweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300

set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG OUT}
out=${2:?usage: sbatch slurm.sh CONFIG OUT}

# shellcheck disable=SC1091
source "${FEDSWEEP_VENV:-${SLURM_SUBMIT_DIR:-.}/.venv}/bin/activate"

# Without a token anybody who reaches the ports of the nodes may run code as you.
umask 077
ray get-auth-token --generate >/dev/null
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1
export PYTHONPATH="${SLURM_SUBMIT_DIR:-$PWD}${PYTHONPATH:+:$PYTHONPATH}"
# Since Slurm 22.05 srun does not take this over from sbatch, and all actors of a node would share one core.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
first_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$first_node" hostname --all-ip-addresses | awk '{print $1}')
address="$first_ip:$((20000 + SLURM_JOB_ID % 20000))"

# "2" or "a100:2"; no GPUs without --gpus-per-node.
gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}
gpus=${gpus##*:}

if grep -q '^sweep:' "$config"; then
    command=(fedsweep sweep)
    if [ -f "$out/sweep.json" ]; then command+=(--resume --out "$out"); else command+=("$config" --out "$out"); fi
    command+=(--set "runtime.address=auto")
elif [ -f "$out/config.yaml" ]; then
    command=(fedsweep run --resume "$out")
else
    command=(fedsweep run "$config" --out "$out" --set "runtime.address=auto")
    if [ "$gpus" -gt 0 ]; then
        command+=(--set "runtime.client_actors=$((SLURM_JOB_NUM_NODES * gpus))" --set "runtime.gpus_per_client=1")
    else
        command+=(--set "runtime.client_actors=$((SLURM_JOB_NUM_NODES * SLURM_CPUS_PER_TASK))")
    fi
fi

# Ray's own processes would end of USR1, so fedsweep alone is told, by the number that it leaves.
pid_file="$PWD/.fedsweep-$SLURM_JOB_ID.pid"
tell() { told=yes; srun --overlap --nodes=1 --ntasks=1 --nodelist="$first_node" bash -c "kill -USR1 \$(cat '$pid_file')"; }
trap tell USR1
trap 'rm -f "$pid_file"' EXIT

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus="$SLURM_CPUS_PER_TASK" \
    --num-gpus="$gpus" -- bash -c 'echo $$ >"$0"; exec "$@"' "$pid_file" "${command[@]}" &
# A trap ends the waiting, with a code of its own: so again, until srun has ended. Bash keeps its code if it already has.
job=$!
while :; do
    told= code=0
    wait "$job" || code=$?
    [ -n "$told" ] || break
done
exit "$code"
