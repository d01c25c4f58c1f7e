"""Does a training on two nodes come back, at other addresses and with swapped GPUs? Two GPUs stand for two nodes.

Run it from the root of the repository, as root::

    python3 tests/hardware/two_nodes.py [--only ddp|fsdp|gloo|sockets] [--times N] [--left-running N] [--limit SECONDS]

Each node is a network namespace with one end of a veth pair; NCCL takes them for two machines (NCCL_HOSTID), and has
sockets alone between them. Each rank is a job of `gpucr run`. While they train, they are dumped as a set, ended, and
restored as a set, N times: in other namespaces with other addresses, and with swapped GPUs. Then they are dumped
running, every --every seconds. At last the same training runs undisturbed for as many steps: all lines must be equal.
`gloo` needs no GPU, `sockets` no torch. Prints a table; exit code 1: anything is not as it should be.
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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.hardware.links import INTERFACE, Node  # noqa: E402 - found where the checkout is

PROGRAM = ROOT / "tests" / "hardware" / "interposed" / "across.py"
PAIRS = (("10.79.0.1", "10.79.0.2"), ("10.79.1.1", "10.79.1.2"))
"""Addresses: of the two nodes where the job starts, and of the two to which it goes, and back."""
RENDEZVOUS_PORT = 7790
LINES_BETWEEN = 5


class Failed(Exception):
    """Something is not as it should be; the message says what."""


@dataclass
class Outcome:
    """What was seen of one training, in seconds."""

    name: str
    dump: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    left_running: list[float] = field(default_factory=list)
    stood_still: list[float] = field(default_factory=list)
    lines: int = 0
    error: str | None = None


class Standstill(threading.Thread):
    """The longest time, during the block, in which a file did not grow."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path, self._is_over = path, threading.Event()
        self.longest_s = 0.0

    def run(self) -> None:
        size, since = self._path.stat().st_size, time.monotonic()
        while not self._is_over.wait(0.005):
            now, now_size = time.monotonic(), self._path.stat().st_size
            self.longest_s = max(self.longest_s, now - since)
            if now_size != size:
                size, since = now_size, now

    def __enter__(self) -> Standstill:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self.join()


class Case:
    """One training on two nodes. ``folder`` has its logs and its store."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.pairs = [[Node(address) for address in pair] for pair in PAIRS]
        for one, other in self.pairs:
            one.link_to(other)
        self.at = 0
        """In which pair of nodes it is."""
        self.is_swapped = False
        self.secret = folder / "secret"
        self.secret.write_bytes(os.urandom(32))
        self.secret.chmod(0o600)
        self.store = folder / "store"
        self.stop = folder / "stop"
        self.on_gpu = name in ("ddp", "fsdp")
        self._names = [f"across-{name}-{os.getpid()}-{rank}" for rank in range(2)]

    def environment(self, rank: int) -> dict[str, str]:
        """What NCCL takes for another machine, and what makes this part of a job on several nodes."""
        given = {
            "SLURM_NNODES": "2",
            "NCCL_HOSTID": f"node-{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        return {**os.environ, **given, "PYTHONPATH": path}

    def gpucr(
        self, ranks: Sequence[int], words: Callable[[int], Sequence[object]], limit_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Run a command on these nodes at once; each must succeed. Returns what they print."""
        started = [
            subprocess.Popen(
                self.pairs[self.at][rank].enter([sys.executable, "-m", "gpucr", *map(str, words(rank))]),
                env=self.environment(rank), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, cwd=ROOT,
            )
            for rank in ranks
        ]  # fmt: skip
        done = []
        try:
            for rank, each in zip(ranks, started, strict=True):
                try:
                    done.append((rank, each.communicate(timeout=limit_s or self.options.limit), each.returncode))
                except subprocess.TimeoutExpired as e:
                    raise Failed(f"node {rank}: gpucr {' '.join(map(str, words(rank)[:2]))} took too long") from e
        finally:
            for each in started:
                if each.poll() is None:
                    each.kill()
        for rank, (_, said), code in done:
            if code != 0:
                raise Failed(f"node {rank}: exit code {code}: {said.strip()}")
        return [json.loads(out) for _, (out, _), _ in done]

    def run(self, label: str, steps: int) -> None:
        """Start both ranks with gpucr, to be ended by the file (0 steps)."""
        address, pause_s = self.pairs[self.at][0].address, 0 if steps else self.options.pause

        def words(rank: int) -> list[object]:
            log = self.log(label, rank)
            program = [self.options.python, PROGRAM, self.name, rank, address, steps, pause_s, self.stop]
            return ["run", "--json", "--name", f"{self._names[rank]}-{label}", "--log", log, "--", *program]

        self.gpucr([0, 1], words)

    def log(self, label: str, rank: int) -> Path:
        """Where a rank prints."""
        return self.folder / f"{label}-{rank}.log"

    def lines(self, label: str, rank: int) -> list[str]:
        """What a rank has printed of its steps."""
        with contextlib.suppress(FileNotFoundError):
            found = [line for line in self.log(label, rank).read_text(errors="replace").splitlines() if "0x" in line]
            return [line for line in found if line.split()[0].isdigit()]
        return []

    def wait_more(self, label: str) -> None:
        """Until both have made a few steps more."""
        wanted = [len(self.lines(label, rank)) + LINES_BETWEEN for rank in range(2)]
        for rank in range(2):
            self.wait(partial(self.has_lines, label, rank, wanted[rank]), label, rank)

    def has_lines(self, label: str, rank: int, count: int) -> bool:
        """Whether a rank has made so many steps."""
        return len(self.lines(label, rank)) >= count

    def wait(self, condition: Callable[[], bool], label: str, rank: int) -> None:
        """Raises Failed with the end of a rank's log if it takes too long."""
        end = time.monotonic() + self.options.limit
        while not condition():
            if time.monotonic() > end:
                tail = self.log(label, rank).read_text(errors="replace")[-1500:]
                raise Failed(f"rank {rank} does not continue: {tail}")
            time.sleep(0.02)

    def meeting(self, rank: int) -> list[object]:
        """Options that say where the nodes meet."""
        where = f"{self.pairs[self.at][0].address}:{RENDEZVOUS_PORT}"
        limit = ["--meet-within", f"{self.options.limit}s", "--timeout", f"{self.options.limit}s"]
        return ["--rendezvous", where, "--secret-file", self.secret, "--node", rank, "--nodes", 2, *limit]

    def dump(self, set_name: str, *more: object) -> list[dict[str, Any]]:
        """Dump both ranks as a set."""
        return self.gpucr(
            [0, 1],
            lambda rank: ["nodes", "dump", "--json", f"{self._names[rank]}-disturbed", "--to",
                          f"{self.store}#{set_name}", *self.meeting(rank), *more],
        )  # fmt: skip

    def there(self, number: int, outcome: Outcome) -> None:
        """Dumped, ended, and restored at the other addresses, on the other GPU every second time."""
        begin = time.monotonic()
        made = self.dump(f"set-{number}")
        outcome.dump.append(time.monotonic() - begin)
        print(f"    dumped in {outcome.dump[-1]:.2f} s: {in_phases(made[0])}", flush=True)
        before = [len(self.lines("disturbed", rank)) for rank in range(2)]
        self.at = 1 - self.at
        gpus = [1, 0] if self.on_gpu and not self.is_swapped else [0, 1]

        def words(rank: int) -> list[object]:
            swap = ["--gpu", gpus[rank]] if self.on_gpu else []
            return [
                "nodes",
                "restore",
                "--json",
                f"{self.store}#set-{number}",
                *self.meeting(rank),
                "--map",
                "auto",
                *swap,
            ]

        begin = time.monotonic()
        back = self.gpucr([0, 1], words)
        outcome.restore.append(time.monotonic() - begin)
        self.is_swapped = not self.is_swapped
        where = f"{PAIRS[self.at]}, GPUs {gpus if self.on_gpu else 'none'}"
        print(f"    restored at {where} in {outcome.restore[-1]:.2f} s: {in_phases(back[0])}", flush=True)
        begin = time.monotonic()
        for rank in range(2):
            if len(self.lines("disturbed", rank)) < before[rank]:
                raise Failed("lines were lost")
        self.wait_more("disturbed")
        print(f"    {LINES_BETWEEN} steps more after {time.monotonic() - begin:.2f} s", flush=True)

    def left_running(self, number: int, outcome: Outcome) -> None:
        """Dumped while it runs."""
        with Standstill(self.log("disturbed", 0)) as still:
            begin = time.monotonic()
            made = self.dump(f"running-{number}", "--leave-running")
            outcome.left_running.append(time.monotonic() - begin)
            self.wait_more("disturbed")
        outcome.stood_still.append(still.longest_s)
        print(f"    left running in {outcome.left_running[-1]:.2f} s, stood still for {still.longest_s:.2f} s: "
              f"{in_phases(made[0])}", flush=True)  # fmt: skip

    def finish(self, label: str) -> list[list[str]]:
        """Both to their end. Returns their lines."""
        self.stop.touch()
        name = [f"{each}-{label}" for each in self._names]
        limit_s = 4 * self.options.limit  # an undisturbed run does all steps meanwhile
        self.gpucr([0, 1], lambda rank: ["wait", "--json", name[rank], "--timeout", f"{limit_s}s"], limit_s + 10)
        self.stop.unlink()
        return [self.lines(label, rank) for rank in range(2)]

    def close(self) -> None:
        for label in ("disturbed", "undisturbed"):
            for rank in range(2):
                command = [sys.executable, "-m", "gpucr", "kill", f"{self._names[rank]}-{label}"]
                subprocess.run(
                    command, env=self.environment(rank), capture_output=True, check=False, timeout=60, cwd=ROOT
                )
        for node in (each for pair in self.pairs for each in pair):
            node.close()


def in_phases(said: dict[str, Any]) -> str:
    """Where the time went."""
    return ", ".join(f"{phase['name']} {phase['seconds']:.2f}" for phase in said["phases"] if phase["seconds"] >= 0.01)


def try_case(name: str, folder: Path, options: argparse.Namespace) -> Outcome:
    """Run it disturbed, then undisturbed, and compare."""
    print(f"{name}:", flush=True)
    outcome = Outcome(name)
    case = Case(name, folder, options)
    try:
        made = [sys.executable, "-m", "gpucr", "store", "init", str(case.store)]
        subprocess.run(made, env=case.environment(0), check=True, capture_output=True, timeout=60, cwd=ROOT)
        case.run("disturbed", 0)
        case.wait_more("disturbed")
        for number in range(options.times):
            case.there(number, outcome)
        for number in range(options.left_running):
            begin = time.monotonic()
            case.left_running(number, outcome)
            if number + 1 < options.left_running:
                time.sleep(max(0.0, begin + options.every - time.monotonic()))
        seen = case.finish("disturbed")
        outcome.lines = len(seen[0])
        case.run("undisturbed", len(seen[0]))
        expected = case.finish("undisturbed")
        for rank in range(2):
            if seen[rank] != expected[rank] or not seen[rank]:
                raise Failed(difference(rank, seen[rank], expected[rank]))
        print(f"    every one of {outcome.lines} lines as undisturbed", flush=True)
    except (Failed, subprocess.SubprocessError, OSError) as error:
        outcome.error = str(error)
        print(f"    FAILED: {error}", flush=True)
    finally:
        case.close()
    return outcome


def difference(rank: int, seen: Sequence[str], expected: Sequence[str]) -> str:
    """Where two runs differ."""
    pairs = zip(seen, expected, strict=False)
    first = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(seen), len(expected)))
    there = seen[first : first + 1], expected[first : first + 1]
    return f"rank {rank}: {len(seen)} lines of {len(expected)}; line {first} is {there[0]}, and was {there[1]}"


@contextlib.contextmanager
def a_folder(kept: bool) -> Iterator[Path]:
    """For all that is written."""
    folder = Path(tempfile.mkdtemp(prefix="gpucr-two-nodes-"))
    try:
        yield folder
    finally:
        if kept:
            print(f"everything is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def median(values: Sequence[float]) -> str:
    """In a column of the table."""
    return f"{statistics.median(values):14.2f}" if values else f"{'':14}"


def main() -> int:
    """All cases. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ddp", "fsdp", "gloo", "sockets"], action="append")
    parser.add_argument("--times", type=int, default=3, help="how often it is ended and restored")
    parser.add_argument("--left-running", type=int, default=2, help="how often it is dumped running")
    parser.add_argument("--every", type=float, default=20, help="seconds from one of these dumps to the next")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each step")
    parser.add_argument("--python", default=sys.executable, help="which has torch")
    parser.add_argument("--keep", action="store_true", help="keep logs and store")
    options = parser.parse_args()
    outcomes = []
    with a_folder(options.keep) as folder:
        for name in options.only or ["ddp", "fsdp"]:
            (folder / name).mkdir()
            outcomes.append(try_case(name, folder / name, options))
    columns = ("dump", "restore", "running", "stood still")
    print(f"{'case':6}{'restored':>9}{'running':>8}{'steps':>7}" + "".join(f"{f'{name} s':>14}" for name in columns))
    for each in outcomes:
        times = "".join(map(median, (each.dump, each.restore, each.left_running, each.stood_still)))
        result = "every line as undisturbed" if each.error is None else f"FAILED: {each.error[:200]}"
        print(f"{each.name:6}{len(each.restore):9}{len(each.left_running):8}{each.lines:7}{times}  {result}")
    return 0 if all(each.error is None for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
