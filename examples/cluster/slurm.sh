#!/bin/bash
# sbatch slurm.sh --steps 40 --out /shared/run
#
# One process per task; JAX finds coordinator and ranks in Slurm's environment. The job goes
# back to the queue if a process dies (at most three times) or if its node fails, and
# train.py goes on from the latest checkpoint.
#SBATCH --job-name=train
#SBATCH --ntasks=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.log

# Slurm copies this script elsewhere: sbatch is called in the folder of train.py.
if ! srun --kill-on-bad-exit=1 python train.py "$@"; then
    [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] || exit 1
    scontrol requeue "$SLURM_JOB_ID"
fi
