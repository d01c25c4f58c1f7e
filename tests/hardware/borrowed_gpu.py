"""A training whose GPU is borrowed again and again ends with the losses of an undisturbed one.

``python3 tests/hardware/borrowed_gpu.py``: needs root, a GPU and torch in the Python that it is started with; CRIU for
the rounds in which host memory counts as full, and the training is dumped instead. ``--program`` runs another program
that appends a line a step to ``losses``, ``--borrower`` another command on the GPU. Each wait has a limit.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpucr
from gpucr.jobs.registered import registry
from tests.hardware.killed_training import undisturbed
from tests.lines import complete_lines

NAME = "lent-training"
LIMIT_S = 300.0
KINDS = ("ends", "fails", "killed", "borrower killed", "dumped")
_MADE_ROOM, _BACK = (re.compile(rf"{NAME} {words} (?:in|after) ([\d.]+) s") for words in ("made room", "is back"))

FILL = """
import torch
free, total = torch.cuda.mem_get_info()
filled = torch.ones(int(0.9 * free), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("filled", filled.numel(), "of", total, flush=True)
"""
"""What a borrower does: it needs nearly all of the GPU, so the training must not be there."""

SHORT_OF_MEMORY = """
import sys, gpucr
from gpucr.borrow import lend
real = lend.preflight
class Short:
    def __getattr__(self, name):
        return getattr(real, name)
    def check_host_memory(self, needs):
        return real.check_host_memory([real.MemoryNeed(1, 1 << 60)])
lend.preflight = Short()
sys.exit(gpucr.borrow_gpus(sys.argv[2:], "0", to=sys.argv[1], say=lambda line: print(line, file=sys.stderr)))
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until it holds; end the script after the limit."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited {LIMIT_S:g} s without success for {what}")
        time.sleep(0.05)


def steps_in(folder: Path) -> int:
    """How far the training is."""
    return len(complete_lines(folder / "losses"))


def is_back() -> bool:
    """Whether nobody has its GPU."""
    record = registry().find(NAME).record
    return record is not None and record.lent is None and not gpucr.list_borrowed().borrowers


def borrow(kind: str, words: list[str], folder: Path) -> dict[str, Any]:
    """One borrower. Returns how long the training took to make room, and to come back."""
    tail = {"fails": "exit 3", "killed": "kill -9 $$", "borrower killed": "sleep 600"}.get(kind, "true")
    line = ["sh", "-c", f'"$@" || exit 99; {tail}', "sh", *words]
    start = [sys.executable, "-m", "gpucr", "borrow", "--gpu", "0", "--network", "host", "--", *line]
    if kind == "dumped":
        start = [sys.executable, "-c", SHORT_OF_MEMORY, str(folder / "away"), *line]
    log = folder / "borrower.log"
    with log.open("w") as out:
        begun = time.monotonic()
        started = subprocess.Popen(start, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if kind == "borrower killed":
            wait_for(lambda: " runs (process" in log.read_text() or started.poll() is not None, log.read_text())
            started.send_signal(signal.SIGKILL)
        code = started.wait(LIMIT_S)
        wait_for(is_back, f"the training to come back: {log.read_text()}")
    said = log.read_text()
    expected = {"fails": 3, "killed": 137, "borrower killed": -9}.get(kind, 0)
    found = {name: pattern.search(said) for name, pattern in (("made_room_s", _MADE_ROOM), ("back_s", _BACK))}
    return {
        "kind": kind,
        "good": code == expected,
        **{name: float(match[1]) if match else None for name, match in found.items()},
        "whole_s": round(time.monotonic() - begun, 1),
        "said": "" if code == expected else said[-2000:],
    }


def main() -> None:
    """Run it, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--program", type=Path)
    parser.add_argument("--borrower", nargs="+")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder, command = undisturbed("borrowed-gpu", options.program, options.steps)
    (folder / "lent").mkdir()
    gpucr.run_job(command, name=NAME, cwd=folder / "lent")
    rounds = []
    for kind in KINDS * options.rounds:
        before = steps_in(folder / "lent")
        wait_for(lambda least=before: steps_in(folder / "lent") > least + 5, "the training to continue")  # type: ignore[misc]
        rounds.append(borrow(kind, options.borrower or [sys.executable, "-c", FILL], folder))
    code = gpucr.wait_job(NAME, timeout_s=4 * LIMIT_S).exit_code
    same = (folder / "lent" / "losses").read_bytes() == (folder / "undisturbed" / "losses").read_bytes()
    if options.json:
        print(json.dumps({"exit_code": code, "same": same, "rounds": rounds}))
    else:
        print(f"{'borrower':16}  good   room s  back s  whole s")
        for each in rounds:
            room, back = str(each["made_room_s"]), str(each["back_s"])
            print(f"{each['kind']:16}  {each['good']!s:5}  {room:>6}  {back:>6}  {each['whole_s']:>7}")
            print(each["said"], end="")
        print(f"exit code {code}, same losses: {same}")
    sys.exit(0 if same and code == 0 and all(each["good"] for each in rounds) else 1)


if __name__ == "__main__":
    main()
