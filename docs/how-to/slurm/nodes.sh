#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:8 --time=04:00:00
#SBATCH --requeue --signal=URG@120 --open-mode=append
exec srun gpucr batch --one-job --to /shared/snapshots --on URG --grace 110s --every 30m -- ./train.sh
