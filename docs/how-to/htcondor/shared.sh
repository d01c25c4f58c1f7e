#!/bin/sh
exec >>"job.$1.out" 2>&1 # HTCondor empties the file of `output` at each start
exec gpucr batch --to /shared/snapshots --every 30m --grace 110s -- python3 train.py
