#!/bin/sh
#SBATCH --gres=gpu:1 --time=04:00:00
#SBATCH --requeue --signal=B:USR1@120 --open-mode=append
trap '' USR1 # nothing, until gpucr listens
exec gpucr batch --to "/shared/$USER/snapshots" --grace 110s --every 30m -- python3 train.py
