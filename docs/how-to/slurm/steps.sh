#!/bin/sh
#SBATCH --ntasks=2 --gres=gpu:2 --time=04:00:00
#SBATCH --requeue --signal=URG@120 --open-mode=append
exec srun gpucr batch --to "/shared/$USER/snapshots" --on URG --grace 110s --every 30m -- python3 work.py
