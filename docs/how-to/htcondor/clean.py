#!/usr/bin/env python3
"""Remove from a store the snapshots of jobs that are not in the queue any more. Run it where the jobs are submitted."""

import json
import subprocess
import sys


def _said(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


store = sys.argv[1]
snapshots = json.loads(_said("gpucr", "ls", "--json", store))["snapshots"]  # before the queue, which grows meanwhile
queue = _said("condor_q", "-allusers", "-format", "condor-%d.", "ClusterId", "-format", "%d\n", "ProcId").split()
for snapshot in snapshots:
    if snapshot["name"].startswith("condor-") and snapshot["name"] not in queue:
        subprocess.run(["gpucr", "rm", f"{store}#{snapshot['id']}"], check=True)
