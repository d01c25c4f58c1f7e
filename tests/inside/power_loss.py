"""In a machine: work on a file system whose writes are logged, then look at what is left of it at many moments.

``python3 -m tests.inside.power_loss FILE-SYSTEM MOMENTS SEED`` with the disks /dev/vdc to /dev/vdf: the file system,
the log, a copy that is brought from moment to moment, and what a mount of it writes. Prints a line for each
moment and fault.
"""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpucr
from gpucr.errors import GpucrError
from tests import command
from tests.inside.write_log import WriteLog, moments

_DISK, _LOG, _COPY, _SCRATCH = "/dev/vdc", "/dev/vdd", "/dev/vde", "/dev/vdf"
_AT = Path("/mnt/logged")
_LOOK = Path("/mnt/look")
_MIB = 300
_SECTORS = _MIB * 2048
_COMMAND_LIMIT_S = 900
_REQUEUE = 99
_SNAPSHOTS, _STORE, _COPIES, _BATCH, _SUPERVISED = "snapshots", "store", "copies", "batch", "supervised"
_STATE = "state/gpucr"
_RESTORED = "restored"
_JOB = (
    "import itertools, time\nblock = bytearray(2 << 20)\nfor number in itertools.count(1):\n"
    "    block[number % len(block)] = number % 251\n    print(number, flush=True)\n    time.sleep(0.02)\n"
)


def main(kind: str, count: int, seed: int) -> int:
    """Returns how many moments showed a fault."""
    begin = time.monotonic()
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
        _say(f"{kind}: moment {looked}, after {time.monotonic() - begin:.0f} s")
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
            reports.append(_mark(reports_as))

    gpucr_does("run", "--name", "job", "--log", "/tmp/job.log", "--", "python3", "-c", _JOB)
    _sh("sync")
    _mark("begin")
    for number in range(2):
        gpucr_does(
            "dump", "job", "--leave-running", "--to", str(_AT / _SNAPSHOTS / str(number)), reports_as=f"folder:{number}"
        )
    for store in (_STORE, _COPIES):
        gpucr_does("store", "init", str(_AT / store), reports_as=f"made:{store}")
    for number in range(3):
        gpucr_does(
            *("dump", "job", "--leave-running", "--to", f"{_AT / _STORE}#s{number}"), reports_as=f"stored:s{number}"
        )
    gpucr_does("copy", str(_AT / _STORE), str(_AT / _COPIES), reports_as="copied:")
    gpucr_does("rm", f"{_AT / _STORE}#s0", reports_as="removed:s0")
    gpucr_does("prune", str(_AT / _STORE))
    _batch(environment)
    reports.append(_mark("batch:"))
    gpucr_does("supervise", "job", "--every", "3s", "--to", str(_AT / _SUPERVISED))
    seen = 0
    deadline = time.monotonic() + _COMMAND_LIMIT_S
    while seen < 2:
        if time.monotonic() > deadline:
            raise RuntimeError(f"two checkpoints take more than {_COMMAND_LIMIT_S} s")
        checkpoints = _checkpoints()
        reports += [_mark(f"supervised:{snapshot}") for snapshot in checkpoints[seen:]]
        seen = len(checkpoints)
        time.sleep(0.2)
    gpucr_does("supervise", "job", "--drain", reports_as="drained:")
    reports.append(_mark(f"supervised:{_checkpoints()[-1]}"))
    return reports


def _mark(report: str) -> str:
    """Note in the log that this was reported."""
    _sh("dmsetup", "message", "logged", "0", "mark", report)
    return report


def _batch(environment: dict[str, str]) -> None:
    """A job whose allocation ends: it is dumped, and asks for another start."""
    words = ("batch", "--to", _AT / _BATCH, "--id", "batch", "--grace", "10m", "--", "python3", "-c", _JOB)
    batch = command.start(*words, env=environment)
    assert batch.stdout is not None
    first = batch.stdout.readline()
    batch.send_signal(signal.SIGUSR1)
    _, said = batch.communicate(timeout=_COMMAND_LIMIT_S)
    if batch.returncode != _REQUEUE:
        raise RuntimeError(f"gpucr batch: exit code {batch.returncode} after {first!r}: {said}")


def _checkpoints() -> list[str]:
    """The supervised snapshots that the supervisor has reported."""
    events = _AT / _STATE / "supervise/job/events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    return [line["snapshot"] for line in lines if line["event"] == "checkpoint"]


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
            faults = [f"{kind}: {fault}" for fault in _faults(known, chance)]
        finally:
            _sh("umount", str(_LOOK))
    finally:
        _sh("dmsetup", "remove", "--retry", "look")
    return faults


def _faults(known: list[str], chance: random.Random) -> list[str]:
    """What is not as it was reported, or not whole."""
    places = _places(known)
    found: list[str] = []
    there = set()
    for store in (_STORE, _COPIES, _BATCH, _SUPERVISED):
        at = _LOOK / store
        if not (at / "gpucr-store.json").exists():  # nothing, or one that nobody was told of
            continue
        there.add(str(at))
        try:
            gpucr.prune_store(at)
            verified = gpucr.verify_snapshots(at, deep=True)
        except (GpucrError, OSError) as e:
            found.append(f"{store}: {type(e).__name__} {e}")
            continue
        there |= {f"{at}#{snapshot.name}" for snapshot in verified.snapshots}
        found += [f"{store}: {name}: {problems[0]}" for name, problems in verified.problems.items()]
    for folder in (_LOOK / _SNAPSHOTS).iterdir() if (_LOOK / _SNAPSHOTS).exists() else ():
        there.add(str(folder))
        found += _half(folder, is_known=str(folder) in places)
    found += [f"{place} is absent" for place in places if place not in there]
    listed = command.run("jobs", "--all", env={"XDG_STATE_HOME": str(_LOOK / "state")})
    if listed.returncode != 0:
        found.append(f"gpucr jobs: {listed.stderr}")
    snapshots = [
        place
        for place in places
        if ("#" in place and not place.endswith("#batch")) or place.startswith(str(_LOOK / _SNAPSHOTS))
    ]
    if snapshots and not found:
        found += _restore(chance.choice(snapshots))
    return found


def _half(folder: Path, *, is_known: bool) -> list[str]:
    """A folder that opens is whole; one that nobody was told of may be refused."""
    try:
        snapshot = gpucr.open_snapshot(folder)
    except GpucrError as e:
        return [f"{folder}: {e}"] if is_known else []
    try:
        snapshot.verify()
    except GpucrError as e:
        return [f"{folder} opens, and is not whole: {e}"]
    return []


def _places(known: list[str]) -> list[str]:
    """Where a command has reported a snapshot, or a store, that must be there."""
    places: list[str] = []
    for what, _, name in (report.partition(":") for report in known):
        if what == "folder":
            places.append(str(_LOOK / _SNAPSHOTS / name))
        elif what == "made":
            places.append(str(_LOOK / name))
        elif what == "stored":
            places.append(f"{_LOOK / _STORE}#{name}")
        elif what == "removed":
            places.remove(f"{_LOOK / _STORE}#{name}")
        elif what == "copied":
            places += [f"{_LOOK / _COPIES}#s{number}" for number in range(3)]
        elif what == "batch":
            places.append(f"{_LOOK / _BATCH}#batch")
        elif what == "supervised":  # an older one may be removed once there is this one
            places = [place for place in places if not place.startswith(str(_LOOK / _SUPERVISED))]
            places.append(f"{_LOOK / _SUPERVISED}#{name}")
    return places


def _restore(place: str) -> list[str]:
    """The job of this snapshot, brought back: it counts on."""
    restored = command.run("restore", place, "--clone", "--name", _RESTORED)
    if restored.returncode != 0:
        return [f"restore of {place}: {restored.stderr}"]
    before = command.run("logs", _RESTORED).stdout
    deadline = time.monotonic() + _COMMAND_LIMIT_S
    while command.run("logs", _RESTORED).stdout == before:
        if time.monotonic() > deadline:
            return [f"the job restored from {place} does not run"]
        time.sleep(0.2)
    command.run("kill", _RESTORED)
    return []


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), 1))
