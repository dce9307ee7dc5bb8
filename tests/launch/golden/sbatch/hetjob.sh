#!/bin/bash
#SBATCH --account=physics
#SBATCH --comment='tdpp 0123'
#SBATCH --cpus-per-task=32
#SBATCH --error=/shared/runs/xl/1/submitit/%j_batch.out
#SBATCH --gres=gpu:a100:4
#SBATCH --job-name=xl
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/xl/1/submitit/%j_batch.out
#SBATCH --partition=hgx
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH hetjob
#SBATCH --comment='tdpp 0123'
#SBATCH --constraint='a10&ib'
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:a10:4
#SBATCH --job-name=xl
#SBATCH --nodes=7
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu2
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=90

export SUBMITIT_EXECUTOR=slurm FOLDER=/shared/runs/xl/1/submitit PYTHONPATH=/opt/tdpp
srun --unbuffered --het-group=0 --cpus-per-task=32 bash -c 'exec /opt/venv/bin/python -P -u -m launch.start_agent "$FOLDER" agent-0-job.json >>"$FOLDER/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1' : --het-group=1 --cpus-per-task=16 bash -c 'exec /opt/venv/bin/python -P -u -m launch.start_agent "$FOLDER" agent-0-job.json >>"$FOLDER/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1'
