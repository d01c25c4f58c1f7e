"""Work on a file system whose writes are logged, then look at what is left of it at many moments.

``python3 -m tests.scenarios.power_loss FILE-SYSTEM MOMENTS SEED FOLDER`` as root. In a machine of `tests.machines`,
dm-log-writes logs from /dev/vdc to /dev/vdd; elsewhere qemu-storage-daemon does, below a loop device. Prints a line for
each moment and fault.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import gpucr
from gpucr.errors import GpucrError
from tests import command
from tests.counter import wait_until
from tests.scenarios.write_log import WriteLog, moments

_MIB = 300
_SECTORS = _MIB * 2048
_LOG_BYTES = 8 << 30
_COMMAND_LIMIT_S = 900
_REQUEUE = 99
_PRUNES = gpucr.PruneRules(grace_s=0, dead_after_s=0, repack_below=0.5)
_SNAPSHOTS, _STORE, _COPIES, _BATCH, _SUPERVISED = "snapshots", "store", "copies", "batch", "supervised"
_STATE = "state/gpucr"
_JOB = (
    "import itertools, time\nblock = bytearray(2 << 20)\nfor number in itertools.count(1):\n"
    "    block[number % len(block)] = number % 251\n    print(number, flush=True)\n    time.sleep(0.02)\n"
)


class _Disk(Protocol):
    """A disk with a volatile cache, whose writes and flushes are logged."""

    device: str

    def mark(self, report: str) -> None:
        """Note between the writes that this was reported."""

    def close(self) -> WriteLog:
        """Take it away; nothing uses it."""


class _ByDeviceMapper:
    device = "/dev/mapper/logged"

    def __init__(self, disk: str, log: str) -> None:
        self._log = log
        _sh("modprobe", "dm-log-writes")
        _sh("dmsetup", "create", "logged", "--table", f"0 {_SECTORS} log-writes {disk} {log}")

    def mark(self, report: str) -> None:
        _sh("dmsetup", "message", "logged", "0", "mark", report)

    def close(self) -> WriteLog:
        _sh("dmsetup", "remove", "--retry", "logged")
        return WriteLog(self._log)


class _ByDaemon:
    """A file of QEMU's below a loop device, which passes each flush on. Marks are writes behind the file system."""

    def __init__(self, folder: Path) -> None:
        self._export, self._log, disk = folder / "export", folder / "log", folder / "disk"
        self._export.touch()
        for path, size_bytes in ((disk, (_MIB + 1) << 20), (self._log, _LOG_BYTES)):
            path.touch()
            os.truncate(path, size_bytes)
        self._daemon = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "qemu-storage-daemon"),
                *("--blockdev", f"driver=file,node-name=disk,filename={disk}"),
                *("--blockdev", f"driver=file,node-name=log,filename={self._log}"),
                *("--blockdev", "driver=blklogwrites,node-name=logged,file=disk,log=log"),
                *("--export", f"type=fuse,id=export,node-name=logged,mountpoint={self._export},writable=on"),
            ]
        )
        wait_until(lambda: os.path.ismount(self._export), "the file of qemu-storage-daemon", timeout_s=_COMMAND_LIMIT_S)
        self.device = _sh("losetup", "--find", "--show", "--sizelimit", f"{_MIB}M", str(self._export)).strip()

    def mark(self, report: str) -> None:
        with self._export.open("rb+", buffering=0) as export:
            export.seek(_SECTORS * 512)
            export.write(report.encode().ljust(512, b"\0"))

    def close(self) -> WriteLog:
        _sh("losetup", "--detach", self.device)
        backing = Path("/sys/block", Path(self.device).name, "loop/backing_file")
        # the mount namespace of an ended job may have it a moment longer
        wait_until(lambda: not backing.exists(), "the end of the last mount", timeout_s=_COMMAND_LIMIT_S)
        self._daemon.terminate()
        self._daemon.wait()
        return WriteLog(str(self._log), marks_from=_SECTORS)


class _PowerLoss:
    """What was done on the file system until the power went, and what is there then."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._at, self._copy, self._seen = folder / "mounted", folder / "copy", folder / "seen"
        self._job_log = folder / "job.log"
        self._state = {"XDG_STATE_HOME": str(folder / "state")}
        self._looks = 0
        self._flushed = 0
        for path in (self._at, self._seen):
            path.mkdir()
        self._copy.touch()
        os.truncate(self._copy, _MIB << 20)
        in_machine = os.environ.get("GPUCR_INSIDE") == "1"
        self._disk: _Disk = _ByDeviceMapper("/dev/vdc", "/dev/vdd") if in_machine else _ByDaemon(folder)

    def work(self) -> tuple[WriteLog, list[str]]:
        """Do everything that reports something as done; each report is a mark in the log, made when it was printed."""
        _sh(f"mkfs.{self._kind}", "-q", *(["-f"] if self._kind != "ext4" else []), self._disk.device)
        _sh("mount", self._disk.device, str(self._at))
        try:
            reports = list(self._reports())
        finally:
            command.run("kill", "job", env=self._environment)
            self._unmount(self._at)
            log = self._disk.close()
        return log, reports

    def _unmount(self, folder: Path) -> None:
        """A killed job has its files open a moment longer."""

        def is_done() -> bool:
            return subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0

        wait_until(is_done, f"the last file in {folder} to be closed", timeout_s=_COMMAND_LIMIT_S, every_s=0.05)

    @property
    def _environment(self) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(self._at / "state")}

    def _does(self, *words: object) -> None:
        done = command.run(*words, env=self._environment)
        if done.returncode != 0:
            raise RuntimeError(f"gpucr {shlex.join(map(str, words))}: {done.stderr}")

    def _reports(self) -> Iterator[str]:
        at = self._at

        def reported(report: str) -> str:
            self._disk.mark(report)
            return report

        (at / _SNAPSHOTS).mkdir()
        self._does("run", "--name", "job", "--log", self._job_log, "--", "python3", "-c", _JOB)
        _sh("sync", "--file-system", str(at))
        self._disk.mark("begin")
        for number in range(2):
            self._does("dump", "job", "--leave-running", "--to", at / _SNAPSHOTS / str(number))
            yield reported(f"folder:{number}")
        for store in (_STORE, _COPIES):
            self._does("store", "init", at / store)
            yield reported(f"made:{store}")
        for number in range(3):
            self._does("dump", "job", "--leave-running", "--to", f"{at / _STORE}#s{number}")
            yield reported(f"stored:s{number}")
        self._does("copy", at / _STORE, at / _COPIES)
        yield reported("copied:")
        yield reported("removing:s0")
        self._does("rm", f"{at / _STORE}#s0")
        yield reported("removed:s0")
        for _ in range(2):  # retires what nothing needs, and deletes it
            self._does("prune", at / _STORE, "--repack", "--grace", "0s")
        self._batch()
        yield reported("batch:")
        self._does("supervise", "job", "--every", "3s", "--to", at / _SUPERVISED)
        seen = 0
        deadline = time.monotonic() + _COMMAND_LIMIT_S
        while seen < 2:
            if time.monotonic() > deadline:
                raise RuntimeError(f"two checkpoints take more than {_COMMAND_LIMIT_S} s")
            checkpoints = self._checkpoints()
            yield from [reported(f"supervised:{snapshot}") for snapshot in checkpoints[seen:]]
            seen = len(checkpoints)
            time.sleep(0.2)
        self._does("supervise", "job", "--drain")
        yield reported("drained:")
        yield reported(f"supervised:{self._checkpoints()[-1]}")

    def _batch(self) -> None:
        """A job whose allocation ends: it is dumped, and asks for another start."""
        words = ("batch", "--to", self._at / _BATCH, "--id", "batch", "--grace", "10m", "--", "python3", "-c", _JOB)
        batch = command.start(*words, env=self._environment)
        assert batch.stdout is not None
        first = batch.stdout.readline()
        batch.send_signal(signal.SIGUSR1)
        _, said = batch.communicate(timeout=_COMMAND_LIMIT_S)
        if batch.returncode != _REQUEUE:
            raise RuntimeError(f"gpucr batch: exit code {batch.returncode} after {first!r}: {said}")

    def _checkpoints(self) -> list[str]:
        """The supervised snapshots that the supervisor has reported."""
        events = self._at / _STATE / "supervise/job/events.jsonl"
        lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        return [line["snapshot"] for line in lines if line["event"] == "checkpoint"]

    def look(self, log: WriteLog, flushed: int, cut: int, reported: list[str], chance: random.Random) -> list[str]:
        """What is wrong if the power goes at ``cut`` of the log, and all before ``flushed`` is on the disk."""
        log.apply(self._flushed, flushed, str(self._copy))
        self._flushed = flushed
        left = self._copy.with_name("left")
        _sh("cp", "--sparse=always", str(self._copy), str(left))
        log.apply_part(flushed, cut, str(left), chance)
        _sh("mount", "-o", "loop", str(left), str(self._seen))
        left.unlink()  # the mount has it
        try:
            return self._faults([report for report in reported if log.marks[report] <= flushed], chance)
        finally:
            self._unmount(self._seen)

    def _faults(self, known: list[str], chance: random.Random) -> list[str]:
        """What is not as it was reported, or not whole."""
        places = self._places(known)
        found: list[str] = []
        there = set()
        for store in (_STORE, _COPIES, _BATCH, _SUPERVISED):
            at = self._seen / store
            if not (at / "gpucr-store.json").exists():  # nothing, or one that nobody was told of
                continue
            there.add(str(at))
            try:
                before = gpucr.verify_snapshots(at, deep=True)
                for _ in range(2):  # the second deletes what the first has retired
                    gpucr.prune_store(at, _PRUNES)
                verified = gpucr.verify_snapshots(at, deep=True)
            except (GpucrError, OSError) as e:
                found.append(f"{store}: {type(e).__name__} {e}")
                continue
            there |= {f"{at}#{called}" for each in verified.snapshots for called in (each.name, each.id)}
            problems = {**before.problems, **verified.problems}
            found += [f"{store}: {name}: {said[0]}" for name, said in problems.items()]
        folders = self._seen / _SNAPSHOTS
        for folder in folders.iterdir() if folders.exists() else ():
            there.add(str(folder))
            found += _half(folder, is_known=str(folder) in places)
        found += [f"{place} is absent" for place in places if place not in there]
        if "removed:s0" in known and f"{self._seen / _STORE}#s0" in there:
            found.append("what was removed is there")
        listed = command.run("jobs", "--all", env={"XDG_STATE_HOME": str(self._seen / "state")})
        if listed.returncode != 0:
            found.append(f"gpucr jobs: {listed.stderr}")
        snapshots = [place for place in places if "#" in place or place.startswith(str(folders))]
        if snapshots and not found:
            found += self._restore(chance.choice(snapshots))
        return found

    def _places(self, known: list[str]) -> list[str]:
        """Where a command has reported a snapshot, or a store, that must be there."""
        seen = self._seen
        places: list[str] = []
        for what, _, name in (report.partition(":") for report in known):
            if what == "folder":
                places.append(str(seen / _SNAPSHOTS / name))
            elif what == "made":
                places.append(str(seen / name))
            elif what == "stored":
                places.append(f"{seen / _STORE}#{name}")
            elif what == "removing":
                places.remove(f"{seen / _STORE}#{name}")
            elif what == "copied":
                places += [f"{seen / _COPIES}#s{number}" for number in range(3)]
            elif what == "batch":
                places.append(f"{seen / _BATCH}#batch")
            elif what == "supervised":  # an older one may be removed once there is this one
                places = [place for place in places if not place.startswith(str(seen / _SUPERVISED))]
                places.append(f"{seen / _SUPERVISED}#{name}")
        return places

    def _restore(self, place: str) -> list[str]:
        """The job of this snapshot, brought back: it counts on."""

        def does(*words: str) -> subprocess.CompletedProcess[str]:
            return command.run(*words, env=self._state)

        self._looks += 1
        name = f"restored-{self._looks}"
        restored = does("restore", place, "--clone", "--name", name)
        if restored.returncode != 0:
            return [f"restore of {place}: {restored.stderr}"]
        before = does("logs", name).stdout
        wait_until(lambda: does("logs", name).stdout != before, f"the job of {place}", timeout_s=_COMMAND_LIMIT_S)
        does("kill", name)
        return []


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


def main(kind: str, count: int, seed: int, folder: Path) -> int:
    """Returns how many moments showed a fault; ``folder`` is empty, and nobody else's."""
    begin = time.monotonic()
    command.TIMEOUT_S = _COMMAND_LIMIT_S
    power = _PowerLoss(kind, folder)
    log, reported = power.work()
    chance = random.Random(seed)  # noqa: S311 - chooses moments
    faults = looked = 0
    for flushed, cut in moments(log, count, chance):
        looked += 1
        known = sum(log.marks[report] <= flushed for report in reported)
        _say(f"{kind}: moment {looked}, {known} reports, after {time.monotonic() - begin:.0f} s")
        found = power.look(log, flushed, cut, reported, chance)
        if found:
            faults += 1
            _say(f"{kind}: moment {flushed} to {cut} of {len(log.entries)}: {'; '.join(found)}")
    _say(f"{kind}: {looked} moments, {len(log.entries)} writes, {len(reported)} reports, {faults} faults")
    return faults


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _sh(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])), 1))
