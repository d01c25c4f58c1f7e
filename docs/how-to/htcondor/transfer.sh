#!/bin/sh
cd /data/work || exit # a folder that all nodes have: HTCondor's own has another name on each node
exec gpucr batch --to "$_CONDOR_SCRATCH_DIR/snapshots" --every 1h --checkpoint-exit 85 --grace 110s -- python3 train.py
