#!/bin/bash
#SBATCH --comment='tdpp 0123'
#SBATCH --error=/shared/runs/xl/1/submitit/%j_batch.out
#SBATCH --gres=gpu:a10:4
#SBATCH --job-name=xl
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/xl/1/submitit/%j_batch.out
#SBATCH --partition=gpu2
#SBATCH --requeue
#SBATCH --signal=USR2@120

export SUBMITIT_EXECUTOR=slurm FOLDER=/shared/runs/xl/1/submitit PYTHONPATH=/opt/tdpp
srun --unbuffered bash -c 'exec /opt/venv/bin/python -P -u -m launch.start_agent "$FOLDER" agent-0-job.json >>"$FOLDER/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1'
