"""Whole jobs on real hardware: torchrun with NCCL and DataLoader workers, other GPUs, and clones.

Run it from the root of the repository, as root, on a machine with 2 or 4 GPUs and torch::

    PYTHONPATH=src python3 -m tests.hardware.whole_jobs --out results

Its parts, which ``--parts`` chooses from:

- ``isolated``: a training of 2 ranks (ddp_job.py), started with `gpucr run`, dumped while it trains, gone, restored,
  and run to its end: its losses must be those of an undisturbed run, bit for bit;
- ``four``: the same with 4 ranks, if there are 4 GPUs (ranks that share a GPU do not come back: docs/adr/hardware.md);
- ``swapped``: restored with its two GPUs exchanged;
- ``shared``: the same in the machine's own namespaces (`--no-isolate`);
- ``locks``: a running training is suspended and resumed 20 times in a row;
- ``refused``: a training with NCCL's own settings (P2P) is refused, and continues;
- ``clones``: a server with a 4 GiB model becomes two, one on each GPU, and both answer as the first one did;
- ``auto``: the same server comes back on GPU 1 (`--gpu auto`) while GPU 0 is full.

With ``--cpu`` the trainings run without GPUs, on Gloo, and only ``isolated`` and ``shared`` are tried: torchrun, its
ranks, sockets and DataLoader workers are the same.

The commands are called as a user calls them. Prints a table, writes ``whole_jobs.json`` into --out, and exits with 1
when anything is not as it should be. Everything that a part started is ended with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpucr.driver.gpus import list_gpus
from gpucr.errors import ProcessNotFound
from gpucr.linux import processes
from tests.hardware.interposed import pace
from tests.hardware.main_job import Failed, first_difference, names, wait_for
from tests.lines import complete_lines

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "tests" / "hardware" / "ddp_job.py"
SERVER = ROOT / "tests" / "hardware" / "programs" / "model_server.py"
STEPS_BEFORE_ACTION = 10
LOCKS = 20
SEEDS = (1, 2, 3)
RUNNING_STATES = ("running", "suspended")
FILLER = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass
class Row:
    """One line of the results. ``said`` is what the commands said of themselves (--json), in order."""

    part: str
    what: str
    ok: bool
    seconds: float
    detail: str = ""
    max_difference: float | None = None
    said: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    out: Path
    steps: int
    pace_s: float
    model_mib: int
    deadline_s: float
    cpu: bool = False

    @property
    def gpu_count(self) -> int:
        """How many GPUs there are to use."""
        return 0 if self.cpu else len(list_gpus())


# --- commands and processes ------------------------------------------------------------------------------------


def call(settings: Settings, *arguments: object, allowed: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run ``gpucr ARGUMENTS``. Raises Failed for a hang and for an exit code that is not allowed."""
    words = [str(argument) for argument in arguments]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpucr", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=settings.deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise Failed(f"gpucr {words[0]} did not end within {e.timeout:.0f} s") from e
    if done.returncode not in allowed:
        raise Failed(f"gpucr {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
    return done


def call_json(settings: Settings, *arguments: object) -> dict[str, Any]:
    """Run ``gpucr ARGUMENTS --json`` and read what it printed."""
    command, *others = arguments
    said: dict[str, Any] = json.loads(call(settings, command, "--json", *others).stdout)
    return said


def end(pid: int | None) -> None:
    """Kill a process and all that descends from it."""
    if pid is not None:
        with contextlib.suppress(ProcessNotFound):
            processes.kill_tree(pid, including_root=True)


class Job:
    """A job of the registry, known by its name, through its dumps and restores. ``said``: by the commands for it."""

    def __init__(self, settings: Settings, folder: Path, name: str) -> None:
        self.settings = settings
        self.folder = folder
        self.name = name
        self.lines_path = folder / "lines"
        self.log_path = folder / "log"
        self._may_step = pace.file_beside(self.lines_path)
        pace.let_continue(self._may_step, pace.AHEAD)
        self.said: list[dict[str, Any]] = []

    @classmethod
    def start(cls, settings: Settings, folder: Path, name: str, command: Sequence[str], *options: str) -> Job:
        """Start a command with `gpucr run`."""
        folder.mkdir(parents=True)
        job = cls(settings, folder, name)
        run = ("run", "--name", name, "--log", job.log_path, "--cwd", ROOT, *options, "--")
        job.said.append(call_json(settings, *run, *command))
        return job

    def record(self) -> dict[str, Any]:
        """Its entry in `gpucr jobs`."""
        found = call_json(self.settings, "jobs", "--all")["jobs"]
        return next((job for job in found if job["name"] == self.name), {"state": "unknown"})

    def lines(self) -> list[str]:
        """The complete lines that it has written."""
        return complete_lines(self.lines_path)

    def wait_lines(self, count: int) -> None:
        """Let it continue, and wait until it has written that many lines."""
        pace.let_continue(self._may_step, count + pace.AHEAD)
        self._wait(lambda: len(self.lines()) >= count, f"line {count}")

    def wait_ready(self) -> None:
        """Wait until its log says that it is ready."""
        self._wait(lambda: b"ready" in self.log_path.read_bytes().split(), "the end of the warm-up")

    def wait_end(self) -> None:
        """Let it continue, and wait until it has ended by itself, and well."""
        pace.let_continue(self._may_step, pace.NO_LIMIT)
        self._wait(lambda: self.record()["state"] == "ended", "the end of the job", while_running=False)
        code = self.record()["exit_code"]
        if code not in (0, None):  # None: in the machine's own namespaces nobody waits for a restored job
            raise Failed(f"the job ended with exit code {code}: {self.log_tail()}")

    def dump(self, *options: str) -> Path:
        """Dump it into a folder beside its lines."""
        snapshot = self.folder / "snapshot"
        self.said.append(call_json(self.settings, "dump", self.name, "--to", snapshot, *options))
        return snapshot

    def restore(self, snapshot: Path, *options: str) -> dict[str, Any]:
        """Restore it. Returns what the command said."""
        self.said.append(call_json(self.settings, "restore", snapshot, *options))
        return self.said[-1]

    def places(self) -> list[str]:
        """The GPUs of all its processes."""
        return sorted({uuid for uuids in self.gpus().values() for uuid in uuids})

    def gpus(self) -> dict[int, list[str]]:
        """The GPUs of each of its CUDA processes, by their pids inside of the job."""
        if self.settings.cpu:
            return {}
        tree = {process.pid for process in processes.tree(self.record()["pid"])}
        found = call_json(self.settings, "ps")["processes"]
        held = {each["ns_pids"][-1]: sorted(each["device_bytes"]) for each in found if each["pid"] in tree}
        if not any(held.values()):
            raise Failed("NVML does not tell which GPUs the job uses: run this where its pids are those of NVML")
        return held

    def close(self) -> None:
        """End what is left of it, and forget it. Its snapshot is large, and goes as well."""
        record = self.record()
        if record["state"] in RUNNING_STATES:
            end(record["keeper_pid"])
            end(record["pid"])
            with contextlib.suppress(Failed):
                wait_for(lambda: self.record()["state"] not in RUNNING_STATES, 20.0, "the end of the job")
        shutil.rmtree(self.folder / "snapshot", ignore_errors=True)
        call(self.settings, "jobs", "--forget", self.name, allowed=(0, 2))

    def log_tail(self) -> str:
        """The last that it printed."""
        return self.log_path.read_text(errors="replace")[-600:].strip() if self.log_path.exists() else ""

    def _wait(self, condition: Callable[[], bool], what: str, *, while_running: bool = True) -> None:
        looked = time.monotonic()

        def happened() -> bool:
            nonlocal looked
            if condition():
                return True
            if not while_running or time.monotonic() < looked + 1.0:
                return False
            looked = time.monotonic()
            if self.record()["state"] == "ended" and not condition():
                raise Failed(f"the job ended before {what}: {self.log_tail()}")
            return False

        try:
            wait_for(happened, self.settings.deadline_s, what)
        except Failed as e:
            raise Failed(f"{e}; its log: {self.log_tail()}") from e


def training(settings: Settings, ranks: int, lines: Path) -> list[str]:
    """How a training is started."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    options = ["--steps", str(settings.steps), "--pace", str(settings.pace_s), "--out", str(lines)]
    if settings.cpu:
        options.append("--cpu")
    return [sys.executable, *torchrun, "--nproc-per-node", str(ranks), str(TRAINING), *options]


@contextlib.contextmanager
def plain_program(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A program without gpucr, ended with all its descendants."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        end(started.pid)
        started.communicate()


def difference(lines: Sequence[str], reference: Sequence[str]) -> tuple[str, float | None]:
    """Where two loss curves differ, in words (empty: nowhere), and by how much at most (None: not as many steps)."""
    words = first_difference(lines, reference)
    if words is None:
        return "", 0.0
    if len(lines) != len(reference):
        return words, None
    losses = [[float.fromhex(line.split()[1]) for line in each] for each in (lines, reference)]
    return words, max(abs(one - other) for one, other in zip(*losses, strict=True))


# --- the parts -------------------------------------------------------------------------------------------------


class Parts:
    """What is tried. Each part is a method of its own, and raises Failed where something is not as it should be."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rows: list[Row] = []
        self._references: dict[int, list[str]] = {}

    def run(self, part: str) -> None:
        """Run one part and note what became of it: a part that fails does not stop the others."""
        begin = time.monotonic()
        try:
            row = getattr(self, part)()
        except Failed as e:
            row = Row(part, "", ok=False, seconds=0.0, detail=str(e))
        row.seconds = time.monotonic() - begin
        self.rows.append(row)
        print(
            f"{part:<10} {row.seconds:>7.1f} s  {'ok' if row.ok else 'WRONG':<6} {row.what}  {row.detail}", flush=True
        )

    def isolated(self) -> Row:
        """Dumped, gone, restored."""
        return self._trained("isolated", ranks=2)

    def four(self) -> Row:
        """The same with 4 ranks."""
        return self._trained("four", ranks=4)

    def swapped(self) -> Row:
        """Restored with the GPUs exchanged."""
        return self._trained("swapped", "--gpu-map", "0=1,1=0", ranks=2)

    def shared(self) -> Row:
        """Without namespaces of its own."""
        return self._trained("shared", ranks=2, run=("--no-isolate",))

    def locks(self) -> Row:
        """Suspended and resumed many times in a row."""
        with self._training("locks", 2) as job:
            seconds: list[float] = []
            for _ in range(LOCKS):
                at_rest = len(job.lines())
                if at_rest + STEPS_BEFORE_ACTION >= self.settings.steps:
                    raise Failed(f"the training was over after {len(seconds)} locks: give it more with --steps")
                suspended = call_json(self.settings, "suspend", job.name)
                job.said.append(suspended["lock"])
                seconds.append(suspended["lock"]["seconds"])
                call_json(self.settings, "resume", job.name)
                job.wait_lines(at_rest + 1)
            detail = f"{len(seconds)} locks: median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s"
            return Row("locks", "suspended and resumed in a row", ok=True, seconds=0.0, detail=detail, said=job.said)

    def refused(self) -> Row:
        """NCCL over P2P: the checkpoint would succeed, and no restore bring it back."""
        folder = self.settings.out / "refused"
        lines = folder / "lines"
        with plain_program(training(self.settings, 2, lines), folder / "log", {"USE_LIBUV": "0"}) as started:
            wait_for(lambda: len(complete_lines(lines)) >= STEPS_BEFORE_ACTION, self.settings.deadline_s, "training")
            done = call(self.settings, "dump", started.pid, "--to", folder / "snapshot", allowed=(3,))
            before = len(complete_lines(lines))
            wait_for(lambda: len(complete_lines(lines)) > before, self.settings.deadline_s, "a step after the refusal")
            reason = done.stderr.strip()
        known = "NCCL" in reason and not (folder / "snapshot").exists()
        return Row("refused", "a default NCCL job is refused and continues", ok=known, seconds=0.0, detail=reason)

    def clones(self) -> Row:
        """One server becomes two, each on a GPU of its own."""
        here = [gpu.uuid for gpu in list_gpus()[:2]]
        with self._server("clones") as job, contextlib.ExitStack() as clones:
            expected = self._answers(job)
            snapshot = job.dump()
            places: list[list[str]] = []
            for gpu in (0, 1):
                name = f"{job.name}-{gpu}"
                job.restore(snapshot, "--clone", "--name", name, "--gpu", str(gpu))
                clone = clones.enter_context(contextlib.closing(Job(self.settings, job.folder, name)))
                places.append(clone.places())
                if self._answers(clone) != expected:
                    raise Failed(f"the clone on GPU {gpu} answers {self._answers(clone)}, the first one {expected}")
            ok = places == [[here[0]], [here[1]]]
            detail = "" if ok else f"they are on {places}"
            return Row("clones", "two clones on two GPUs", ok=ok, seconds=0.0, detail=detail, said=job.said)

    def auto(self) -> Row:
        """The GPU that it had is full by now."""
        here = [gpu.uuid for gpu in list_gpus()]
        with self._server("auto") as job:
            expected = self._answers(job)
            snapshot = job.dump()
            log = job.folder / "filler"
            with plain_program([sys.executable, "-c", FILLER], log, {"CUDA_VISIBLE_DEVICES": here[0]}):
                wait_for(lambda: b"ready" in log.read_bytes().split(), self.settings.deadline_s, "a full GPU 0")
                call(self.settings, "restore", snapshot, allowed=(3,))
                said = job.restore(snapshot, "--gpu", "auto")
                places = job.places()
                if self._answers(job) != expected:
                    raise Failed("the restored server answers differently")
            ok = len(places) == 1 and places[0] != here[0]
            detail = "; ".join(said["gpu_reasons"])
            return Row("auto", "restored while its GPU is full", ok=ok, seconds=0.0, detail=detail, said=job.said)

    def _trained(self, part: str, *restore: str, ranks: int, run: Sequence[str] = ()) -> Row:
        reference = self._reference(ranks)
        with self._training(part, ranks, *run) as job:
            before = job.gpus()
            snapshot = job.dump()
            at_rest = len(job.lines())
            if at_rest >= self.settings.steps:
                raise Failed("the training had made all its steps before the dump: give it more with --steps")
            said = job.restore(snapshot, *restore)
            job.wait_lines(min(at_rest + 1, self.settings.steps))
            after = job.gpus()
            job.wait_end()
            words, largest = difference(job.lines(), reference)
            moved = said["gpu_map"] or {}
            expected = {pid: sorted(moved.get(uuid, uuid) for uuid in uuids) for pid, uuids in before.items()}
            if after != expected or bool(moved) != bool(restore):
                words = f"the ranks are on {after}, not on {expected}; {words}"
            return Row(
                part,
                f"{ranks} ranks, dumped at step {at_rest} of {self.settings.steps}",
                ok=not words,
                seconds=0.0,
                detail=words or "every loss is that of the undisturbed run",
                max_difference=largest,
                said=job.said,
            )

    def _reference(self, ranks: int) -> list[str]:
        """The losses of an undisturbed run, without gpucr, but with the same settings of NCCL."""
        if ranks not in self._references:
            if not self.settings.cpu and self.settings.gpu_count < ranks:
                raise Failed(f"{ranks} ranks need as many GPUs, and here are {self.settings.gpu_count}")
            folder = self.settings.out / f"reference-{ranks}"
            command = training(self.settings, ranks, folder / "lines")
            plan = call_json(self.settings, "run", "--explain", "--", *command)
            wanted = {each["variable"]: each["value"] for each in plan["environment_changes"] if each["set"]}
            with plain_program(command, folder / "log", wanted | {"USE_LIBUV": "0"}) as started:
                wait_for(lambda: started.poll() is not None, self.settings.deadline_s, "the end of the reference")
            lines = complete_lines(folder / "lines")
            if len(lines) != self.settings.steps:
                log = (folder / "log").read_text(errors="replace")[-600:]
                raise Failed(f"the undisturbed run made {len(lines)} steps: {log}")
            self._references[ranks] = lines
        return self._references[ranks]

    @contextlib.contextmanager
    def _training(self, part: str, ranks: int, *options: str) -> Iterator[Job]:
        folder = self.settings.out / part
        command = training(self.settings, ranks, folder / "lines")
        with contextlib.closing(Job.start(self.settings, folder, f"whole-{part}", command, *options)) as job:
            job.wait_lines(STEPS_BEFORE_ACTION)
            yield job

    @contextlib.contextmanager
    def _server(self, part: str) -> Iterator[Job]:
        command = [sys.executable, str(SERVER), "--mib", str(self.settings.model_mib)]
        with contextlib.closing(Job.start(self.settings, self.settings.out / part, f"whole-{part}", command)) as job:
            job.wait_ready()
            yield job

    def _answers(self, job: Job) -> list[str]:
        client = [sys.executable, str(SERVER), "--ask"]
        return [call(self.settings, "exec", job.name, "--", *client, str(seed)).stdout.strip() for seed in SEEDS]


PARTS = ("isolated", "four", "swapped", "shared", "locks", "refused", "clones", "auto")
PARTS_ON_CPU = ("isolated", "shared")


def chosen_parts(parts: Sequence[str] | None, gpu_count: int) -> list[str]:
    """Those that are asked for; without a choice, all that this machine has the GPUs for."""
    if parts is not None:
        return list(parts)
    if gpu_count == 0:
        return list(PARTS_ON_CPU)
    return [part for part in PARTS if part != "four" or gpu_count >= 4]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run, write the results. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parts", type=names(PARTS), help=",".join(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="folder for lines, logs, snapshots and whole_jobs.json")
    parser.add_argument("--steps", type=int, default=200, help="steps of each training")
    parser.add_argument("--pace", type=float, default=0.05, metavar="S", help="seconds that a rank sleeps after a step")
    parser.add_argument("--model-mib", type=int, default=4096, help="size of the server's model")
    parser.add_argument("--deadline", type=float, default=180.0, metavar="S", help="seconds until a wait is a hang")
    parser.add_argument("--cpu", action="store_true", help="trainings without GPUs")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(out, options.steps, options.pace, options.model_mib, options.deadline, options.cpu)
    parts = Parts(settings)
    for part in chosen_parts(options.parts, settings.gpu_count):
        parts.run(part)
    ok = bool(parts.rows) and all(row.ok for row in parts.rows)
    (out / "whole_jobs.json").write_text(json.dumps({"ok": ok, "rows": [asdict(row) for row in parts.rows]}, indent=2))
    print("ok" if ok else f"{sum(not row.ok for row in parts.rows)} of {len(parts.rows)} parts are wrong")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
