#!/bin/bash
# One experiment on several nodes of a Slurm cluster:
#
#   sbatch docs/cluster/slurm.sh experiment.yaml results/my-run
#
# Starts Ray on every node of the job, runs fedsweep on the first, and stops Ray again. An unfinished run in the
# output folder is gone on with, so the same line may be submitted again after a time limit.
#
# Needs on every node: the same Python environment (here .venv in the folder of the submission, or FEDSWEEP_VENV) and
# the same home folder, where Ray's token lies. The data set is read by the first node alone.
#SBATCH --job-name=fedsweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=04:00:00

set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG OUT}
out=${2:?usage: sbatch slurm.sh CONFIG OUT}

# shellcheck disable=SC1091
source "${FEDSWEEP_VENV:-${SLURM_SUBMIT_DIR:-.}/.venv}/bin/activate"

# Without a token anybody who reaches the ports of the nodes may run code as you.
umask 077
ray get-auth-token --generate >/dev/null
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
first_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$first_node" hostname --all-ip-addresses | awk '{print $1}')
address="$first_ip:$((20000 + SLURM_JOB_ID % 20000))"

if [ -f "$out/config.yaml" ]; then
    command=(fedsweep run --resume "$out")
else
    command=(
        fedsweep run "$config" --out "$out"
        --set "runtime.address=auto"
        --set "runtime.client_actors=$((SLURM_JOB_NUM_NODES * SLURM_CPUS_PER_TASK))"
    )
fi

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus="$SLURM_CPUS_PER_TASK" -- \
    "${command[@]}"
