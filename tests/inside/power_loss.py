"""In a machine: work on a file system whose writes are logged, then look at what is left of it at many moments.

``python -m tests.inside.power_loss FILE-SYSTEM MOMENTS SEED`` with the disks /dev/vdc to /dev/vdf: the file system,
the log, a copy that is brought from moment to moment, and what a mount of it writes. Prints a line, and each fault.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import gpucr
from gpucr.errors import GpucrError, StoreDamaged
from tests import command
from tests.inside.write_log import WriteLog, moments

_DISK, _LOG, _COPY, _SCRATCH = "/dev/vdc", "/dev/vdd", "/dev/vde", "/dev/vdf"
_AT = Path("/mnt/logged")
_LOOK = Path("/mnt/look")
_MIB = 300
_SECTORS = _MIB * 2048
_COMMAND_LIMIT_S = 900
_SNAPSHOTS, _STORE, _COPIES, _SUPERVISED = "snapshots", "store", "copies", "supervised"
_JOB = (
    "import itertools, time\nblock = bytearray(2 << 20)\nfor number in itertools.count(1):\n"
    "    block[number % len(block)] = number % 251\n    print(number, flush=True)\n    time.sleep(0.02)\n"
)


def main(kind: str, count: int, seed: int) -> int:
    """Returns how many moments showed a fault."""
    _prepare(kind)
    reported = _work()
    _sh("umount", str(_AT))
    _sh("dmsetup", "remove", "logged")
    log = WriteLog(_LOG)
    faults = 0
    looked = 0
    done = 0
    chance = random.Random(seed)  # noqa: S311 - chooses moments
    for flushed, cut in moments(log, count, chance):
        log.apply(done, flushed, _COPY)
        done = flushed
        looked += 1
        found = _look(kind, log, flushed, cut, reported, chance)
        if found:
            faults += 1
            _say(f"moment {flushed} to {cut} of {len(log.entries)}: {'; '.join(found)}")
    _say(f"{kind}: {looked} moments, {len(log.entries)} writes, {len(reported)} reports, {faults} faults")
    return faults


def _prepare(kind: str) -> None:
    _sh("modprobe", "dm-log-writes")
    _sh("modprobe", "dm-snapshot")
    for path in (_AT, _LOOK):
        path.mkdir(exist_ok=True)
    _sh("dmsetup", "create", "logged", "--table", f"0 {_SECTORS} log-writes {_DISK} {_LOG}")
    _sh(f"mkfs.{kind}", "-q", *(["-f"] if kind != "ext4" else []), "/dev/mapper/logged")
    _sh("mount", "/dev/mapper/logged", str(_AT))


def _work() -> list[str]:
    """Do everything that reports something as done; each report is a mark in the log, made when it was printed."""
    command.TIMEOUT_S = _COMMAND_LIMIT_S
    environment = {"XDG_STATE_HOME": str(_AT / "state")}
    (_AT / _SNAPSHOTS).mkdir()
    reports: list[str] = []

    def gpucr_does(*words: str, reports_as: str = "") -> None:
        done = command.run(*words, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"gpucr {shlex.join(words)}: {done.stderr}")
        if reports_as:
            _sh("dmsetup", "message", "logged", "0", "mark", reports_as)
            reports.append(reports_as)

    gpucr_does("run", "--name", "job", "--log", "/tmp/job.log", "--", "python3", "-c", _JOB)
    _sh("sync")
    _sh("dmsetup", "message", "logged", "0", "mark", "begin")
    for number in range(2):
        gpucr_does(
            "dump", "job", "--leave-running", "--to", str(_AT / _SNAPSHOTS / str(number)), reports_as=f"folder:{number}"
        )
    for number in range(3):
        gpucr_does(
            *("dump", "job", "--leave-running", "--to", f"{_AT / _STORE}#s{number}"), reports_as=f"stored:s{number}"
        )
    gpucr_does("copy", str(_AT / _STORE), str(_AT / _COPIES), reports_as="copied:")
    gpucr_does("rm", f"{_AT / _STORE}#s0", reports_as="removed:s0")
    gpucr_does("prune", str(_AT / _STORE))
    gpucr_does("supervise", "job", "--every", "3s", "--to", str(_AT / _SUPERVISED))
    events = _AT / "state/gpucr/supervise/job/events.jsonl"
    seen = 0
    while seen < 2:
        checkpoints = [line for line in events.read_text().splitlines() if '"checkpoint"' in line]
        for line in checkpoints[seen:]:
            _sh("dmsetup", "message", "logged", "0", "mark", f"supervised:{json.loads(line)['snapshot']}")
            reports.append(f"supervised:{json.loads(line)['snapshot']}")
        seen = len(checkpoints)
        time.sleep(0.2)
    gpucr_does("supervise", "job", "--drain", reports_as="drained:")
    return reports


def _look(kind: str, log: WriteLog, flushed: int, cut: int, reported: list[str], chance: random.Random) -> list[str]:
    """What is wrong if the power goes when the log had come to ``cut``, and all before ``flushed`` is on the disk."""
    table = f"0 {_SECTORS} snapshot {_COPY} {_SCRATCH} N 8"
    _sh("dd", "if=/dev/zero", f"of={_SCRATCH}", "bs=4096", "count=1", "conv=notrunc", "status=none")
    _sh("dmsetup", "create", "look", "--table", table)
    faults: list[str] = []
    try:
        log.apply_part(flushed, cut, "/dev/mapper/look", chance)
        _sh("mount", "/dev/mapper/look", str(_LOOK), *(["-o", "nouuid"] if kind == "xfs" else []))
        try:
            known = [report for report in reported if log.marks[report] <= flushed]
            faults = [f"{kind}: {fault}" for fault in _faults(known)]
        finally:
            _sh("umount", str(_LOOK))
    finally:
        _sh("dmsetup", "remove", "--retry", "look")
    return faults


def _faults(known: list[str]) -> list[str]:
    found: list[str] = []
    removed = {report.partition(":")[2] for report in known if report.startswith("removed")}
    for report in known:
        what, _, name = report.partition(":")
        try:
            if what == "folder":
                gpucr.open_snapshot(_LOOK / _SNAPSHOTS / name).verify()
            elif what == "stored" and name not in removed:
                _verify(f"{_LOOK / _STORE}#{name}")
            elif what == "copied":
                _verify(str(_LOOK / _COPIES))
            elif what == "supervised":
                pass  # older ones may be removed: the last one is looked at below
        except (GpucrError, OSError) as e:
            found.append(f"{report}: {e}")
    checkpoints = [report.partition(":")[2] for report in known if report.startswith("supervised")]
    for place, needed in ((_STORE, ""), (_COPIES, ""), (_SUPERVISED, checkpoints[-1] if checkpoints else "")):
        store = _LOOK / place
        if not (store / "gpucr-store.json").exists():
            if any(
                report.startswith({_STORE: "stored", _COPIES: "copied", _SUPERVISED: "supervised"}[place])
                for report in known
            ):
                found.append(f"the store {place} is absent")
            continue
        try:
            if needed:
                _verify(f"{store}#{needed}")
            _verify(str(store))
            gpucr.prune_store(store)
            _verify(str(store))
        except (GpucrError, OSError) as e:
            found.append(f"{place}: {type(e).__name__} {e}")
    return found


def _verify(place: str) -> None:
    """Raises GpucrError for the first problem."""
    for name, problems in gpucr.verify_snapshots(place, deep=True).problems.items():
        raise StoreDamaged(f"{name}: {problems[0]}", path=place)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), 1))
