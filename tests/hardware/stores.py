"""Stores on real hardware: how much the next snapshot of a model adds, and that each one comes back alone.

Run it from the root of the repository, as root, on a machine with a GPU and torch::

    PYTHONPATH=src python3 -m tests.hardware.stores --out results

Its parts, which ``--parts`` chooses from. Each has a store of its own:

- ``inference``: a process that only reads its weights, dumped twice;
- ``training``: one that trains a part of its model, dumped twice;
- ``replicas``: two processes with the same weights, and the first one of them once more.

What is shown: the second snapshot of the inference process, and the later ones of the replicas, add less than 5 % of
what the first one did; that of the training process what was trained. Then each snapshot is restored, and the
checksums of all weights must be those of an undisturbed run; once out of the whole store, and once out of a copy of it
in which all other snapshots were removed, pruned, and the rest verified in full.

With ``--driver`` the programs use the bare driver API in place of torch. So the harness runs on the simulated driver::

    eval "$(gpucr sim env)"
    PYTHONPATH=src python3 -m tests.hardware.stores --driver --mib 256 --trained-mib 16 --out results

Prints a table, writes ``stores.json`` into --out, and exits with 1 when anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.hardware import whole_jobs
from tests.hardware.main_job import Failed, Job, adopt_orphans, names
from tests.hardware.whole_jobs import Row, call, call_json

PARTS = ("inference", "training", "replicas")
LIMIT = 0.05
CHECKED_STEPS = 3
MARGIN_BYTES = 64 << 20
"""What torch and cuBLAS work in, beside the weights and their gradients."""

Expected = Callable[[str], str]
"""The line that an undisturbed run has instead of this one."""


@dataclass(frozen=True)
class Settings(whole_jobs.Settings):
    """What the command line says; ``model_mib`` is the size of the model."""

    trained_mib: int = 0
    driver: bool = False
    compress: str = "auto"
    encrypt: bool = False


class StoreUnderTest:
    """A store of one part. ``said``: what the commands said of themselves."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.path = folder
        self.said: list[dict[str, Any]] = []
        self._settings = settings
        key = settings.out / "key"
        if settings.encrypt and not key.exists():
            key.write_bytes(os.urandom(32))
        self._key_option = ("--key-file", key) if settings.encrypt else ()

    def call(self, command: str, *arguments: object) -> dict[str, Any]:
        """Run a command on it."""
        self.said.append(call_json(self._settings, command, *arguments, *self._key_option))
        return self.said[-1]

    def init(self) -> None:
        """Make it."""
        encrypt = ("--encrypt",) if self._settings.encrypt else ()
        call(self._settings, "store", "init", self.path, *encrypt, *self._key_option)

    def dump(self, job: Job, name: str, *options: str) -> dict[str, Any]:
        """Dump a job into it. Without ``--leave-running`` the job is gone then."""
        said = self.call("dump", job.pid, "--to", self.at(name), "--compress", self._settings.compress, *options)
        if not said["left_running"]:
            job.wait_gone()
        return said

    def check(self, job: Job, name: str, expected: Expected) -> None:
        """Restore a snapshot, compare what it continues with, and end it."""
        before = len(job.lines())
        self.call("restore", self.at(name))
        job.wait_lines(before + CHECKED_STEPS)
        for line in job.lines()[before:]:
            if line != expected(line):
                raise Failed(f"restored from {name} it continues with {line!r}, not {expected(line)!r}")
        job.kill()

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[StoreUnderTest]:
        """A copy in which this is the only snapshot that is left. Nothing in a store is ever changed: links will do."""
        copy = StoreUnderTest(self._settings, self.path.with_name(f"{self.path.name}-{name}"))
        shutil.copytree(self.path, copy.path, copy_function=os.link)
        copy.path.chmod(0o700)
        try:
            for other in copy.call("ls", copy.path)["snapshots"]:
                if other["name"] != name:
                    copy.call("rm", copy.at(other["name"]))
            for _ in range(2):  # retired by the first one, deleted by the second
                pruned = copy.call("prune", copy.path, "--repack", "--grace", "0s", "--dead-after", "0s")
            if pruned["waiting_packs"] or pruned["retired_packs"]:
                raise Failed(f"prune left something over: {pruned}")
            if copy.call("verify", copy.path, "--deep")["damaged"]:
                raise Failed("a pruned store is damaged")
            yield copy
        finally:
            shutil.rmtree(copy.path)
            self.said += copy.said

    def at(self, name: str) -> str:
        """What names a snapshot in it."""
        return f"{self.path}#{name}"


class Parts:
    """What is tried. Each part is a method of its own, and raises Failed where something is not as it should be."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rows: list[Row] = []

    def run(self, part: str) -> None:
        """Run one part and note what became of it: a part that fails does not stop the others."""
        begin = time.monotonic()
        store = StoreUnderTest(self.settings, self.settings.out / f"store-{part}")
        row = Row(part, "", ok=False, seconds=0.0)
        try:
            store.init()
            row.what = getattr(self, part)(store)
            row.ok = True
        except Failed as e:
            row.detail = str(e)
        finally:
            shutil.rmtree(store.path, ignore_errors=True)
        row.seconds, row.said = time.monotonic() - begin, store.said
        self.rows.append(row)
        print(f"{part:<10} {row.seconds:>7.1f} s  {'ok' if row.ok else 'WRONG':<6} {row.what} {row.detail}", flush=True)

    def inference(self, store: StoreUnderTest) -> str:
        """Only the first snapshot has the weights."""
        with self._job("inference", 0) as job:
            written = [store.dump(job, "first", "--leave-running"), store.dump(job, "second")]
            self._require_small(written)
            self._each_comes_back(store, {"first": job, "second": job}, _same_as(job))
        return _added(written)

    def training(self, store: StoreUnderTest) -> str:
        """The second snapshot has what was trained."""
        reference = self._reference()
        trained_bytes = self.settings.trained_mib << 20
        with self._job("training", self.settings.trained_mib) as job:
            written = [store.dump(job, "first", "--leave-running")]
            job.wait_lines(len(job.lines()) + CHECKED_STEPS)
            written.append(store.dump(job, "second"))
            differences = store.call("diff", store.at("first"), store.at("second"))["differences"]
            changed = sum(each["changed_bytes"] for each in differences if each["kind"] == "device")
            # Weights, gradients, and what the allocator keeps of the updates.
            if not trained_bytes <= changed <= 3 * trained_bytes + MARGIN_BYTES:
                raise Failed(f"{changed} bytes of device memory differ, and {trained_bytes} were trained")
            first, second = (each["written_bytes"] for each in written)
            if second > changed + LIMIT * first:
                raise Failed(f"{second} bytes were added for {changed} that changed")
            self._each_comes_back(store, {"first": job, "second": job}, reference)
        return f"{_added(written)}; {_gib(changed)} of device memory changed"

    def replicas(self, store: StoreUnderTest) -> str:
        """The weights are there once for both."""
        with self._job("replica-1", 0) as one, self._job("replica-2", 0) as two:
            if one.lines()[0] != two.lines()[0]:
                raise Failed("the two do not have the same weights")
            written = [
                store.dump(one, "first", "--leave-running"),
                store.dump(two, "second"),
                store.dump(one, "third"),
            ]
            self._require_small(written)
            self._each_comes_back(store, {"first": one, "second": two, "third": one}, _same_as(one))
        return _added(written)

    def _each_comes_back(self, store: StoreUnderTest, jobs: dict[str, Job], expected: Expected) -> None:
        for name, job in jobs.items():
            store.check(job, name, expected)
        for name, job in jobs.items():
            with store.alone(name) as alone:
                alone.check(job, name, expected)

    def _require_small(self, dumps: Sequence[dict[str, Any]]) -> None:
        first, *later = (each["written_bytes"] for each in dumps)
        if max(later) >= LIMIT * first:
            raise Failed(f"too much was added: {_added(dumps)}")

    @contextlib.contextmanager
    def _job(self, name: str, trained_mib: int) -> Iterator[Job]:
        """A running program; it continues until it is ended."""
        steps = self.settings.steps if trained_mib else 1_000_000
        job = Job(
            self._command(trained_mib, steps, self.settings.pace_s),
            self.settings.out / name,
            self.settings.deadline_s,
        )
        try:
            job.wait_ready()
            yield job
        finally:
            job.kill()

    def _reference(self) -> Expected:
        """The lines of a training that nobody disturbs."""
        steps = self.settings.steps
        job = Job(
            self._command(self.settings.trained_mib, steps, 0.0),
            self.settings.out / "reference",
            self.settings.deadline_s,
        )
        try:
            job.wait_lines(steps)
            lines = job.lines()
        finally:
            job.kill()
        return lambda line: lines[int(line.split()[0])]

    def _command(self, trained_mib: int, steps: int, pace_s: float) -> list[str]:
        program = [sys.executable, "-m", "tests.hardware.programs.stored_model"]
        sizes = ["--mib", str(self.settings.model_mib), "--trained-mib", str(trained_mib)]
        engine = ["--driver"] if self.settings.driver else []
        return [*program, *sizes, *engine, "--steps", str(steps), "--pace", str(pace_s)]


def _same_as(job: Job) -> Expected:
    """Weights that nobody changes have the same checksum in every step."""
    value = job.lines()[0].split()[1]
    return lambda line: f"{line.split()[0]} {value}"


def _added(dumps: Sequence[dict[str, Any]]) -> str:
    first, *later = (each["written_bytes"] for each in dumps)
    return f"{_gib(first)}, then " + ", ".join(f"{_gib(each)} ({each / first:.1%})" for each in later)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run, write the results. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parts", type=names(PARTS), default=",".join(PARTS), help=",".join(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="folder for lines, logs, stores and stores.json")
    parser.add_argument("--mib", type=int, default=8192, help="size of the model")
    parser.add_argument("--trained-mib", type=int, default=256, help="how much of it is trained")
    parser.add_argument("--steps", type=int, default=400, help="steps of the training")
    parser.add_argument("--pace", type=float, default=0.2, metavar="S", help="seconds a program sleeps after a step")
    parser.add_argument("--deadline", type=float, default=240.0, metavar="S", help="seconds until a wait is a hang")
    parser.add_argument("--compress", default="auto", choices=("auto", "none", "fast", "strong"), help="of each dump")
    parser.add_argument("--encrypt", action="store_true", help="encrypted stores")
    parser.add_argument("--driver", action="store_true", help="the bare driver API, in place of torch")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    settings = Settings(
        out,
        options.steps,
        options.pace,
        options.mib,
        options.deadline,
        trained_mib=options.trained_mib,
        driver=options.driver,
        compress=options.compress,
        encrypt=options.encrypt,
    )
    parts = Parts(settings)
    for part in options.parts:
        parts.run(part)
    ok = all(row.ok for row in parts.rows)
    (out / "stores.json").write_text(json.dumps({"ok": ok, "rows": [asdict(row) for row in parts.rows]}, indent=2))
    print("ok" if ok else f"{sum(not row.ok for row in parts.rows)} of {len(parts.rows)} parts are wrong")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
