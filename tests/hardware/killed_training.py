"""A training that is killed ten times and hung twice ends with the losses of an undisturbed one.

``python3 -m tests.hardware.killed_training``: needs root, CRIU, a GPU and torch in the Python that it is started with
(``--program`` runs another program that appends a line a step to ``losses`` and prints it). Each wait has a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpucr
from gpucr.jobs.registered import registry
from gpucr.supervise.folder import SupervisedFolder
from tests.lines import complete_lines

NAME = "killed-training"
LIMIT_S = 300.0

TRAINING = """
import sys, time, torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator(device="cuda").manual_seed(1)
with open("losses", "w", buffering=1) as losses:
    for step in range(int(sys.argv[1])):
        data = torch.randn(256, 1024, device="cuda", generator=generator)
        loss = torch.nn.functional.mse_loss(model(data), data.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{step} {loss.item().hex()}", file=losses)
        print(step, flush=True)
        time.sleep(0.02)
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until it holds; end the script after the limit."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            log = SupervisedFolder(NAME).log_path
            sys.exit(
                f"waited {LIMIT_S:g} s without success for {what}:\n{log.read_text()[-4000:] if log.exists() else ''}"
            )
        time.sleep(0.1)


def events(kind: str) -> int:
    """How many events of this kind there were."""
    lines = complete_lines(SupervisedFolder(NAME).events_path)
    return sum(json.loads(line)["event"] == kind for line in lines)


def disturb(number: signal.Signals) -> None:
    """After one more checkpoint, send the signal to the job and wait until it is back."""
    checkpoints, restored = events("checkpoint"), events("restored")
    wait_for(lambda: events("checkpoint") > checkpoints, "a checkpoint")
    record = registry().find(NAME).record
    assert record is not None
    os.kill(record.pid, number)
    wait_for(lambda: events("restored") > restored, f"the restore after {number.name}")


def undisturbed(name: str, given: Path | None, steps: int) -> tuple[Path, list[str]]:
    """Let the training run through. Returns a new folder, with the losses below ``undisturbed``, and its command."""
    folder = Path(tempfile.mkdtemp(prefix=f"gpucr-{name}-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    program = given.resolve() if given else folder / "train.py"
    if given is None:
        program.write_text(TRAINING)
    command = [sys.executable, str(program), str(steps)]
    (folder / "undisturbed").mkdir()
    subprocess.run(command, cwd=folder / "undisturbed", stdout=subprocess.DEVNULL, check=True, timeout=4 * LIMIT_S)
    return folder, command


def main() -> None:
    """Run it, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--hangs", type=int, default=2)
    parser.add_argument("--program", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder, command = undisturbed("killed-training", options.program, options.steps)
    (folder / "disturbed").mkdir()
    store = gpucr.init_store(folder / "store").backend.url
    settings = gpucr.Supervision(store=store, every_s=5.0, output_timeout_s=15.0, keep_last=3)
    gpucr.run_supervised(command, settings, name=NAME, cwd=folder / "disturbed")
    for _ in range(options.kills):
        disturb(signal.SIGKILL)
    for _ in range(options.hangs):
        disturb(signal.SIGSTOP)
    state = gpucr.wait_job(NAME, timeout_s=4 * LIMIT_S)
    wait_for(lambda: SupervisedFolder(NAME).running() is None, "the end of the supervisor")
    supervised = SupervisedFolder(NAME).state()
    found: dict[str, Any] = {
        "exit_code": state.exit_code,
        "restarts": dict(supervised.restarts),
        "checkpoints": dict(supervised.checkpoints),
        "downtime_s": supervised.downtime_s,
        "losses": len((folder / "disturbed" / "losses").read_text().splitlines()),
        "same": (folder / "disturbed" / "losses").read_bytes() == (folder / "undisturbed" / "losses").read_bytes(),
    }
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:12} {value}")
    sys.exit(0 if found["same"] and state.exit_code == 0 else 1)


if __name__ == "__main__":
    main()
