"""Several inference servers on one GPU that does not hold all of them: they sleep until they are asked.

    python3 tests/hardware/on_demand.py [--gib N] [--requests N] [--small] [--limit SECONDS] [--json FILE]

Run it from the root of the repository, as root, on a machine with a GPU, torch and transformers; no network. Three
servers of random weights, each with 40 % of the GPU (``--gib`` for another size), start when they are first asked.
Then: the time to the first byte awake, asleep, and asleep with an eviction; a suspend and a resume by the driver alone;
and requests in random order from 8 clients, half of them curl, whose answers must be those of the servers themselves.
``--small``: ten servers of 6 GiB that sleep after two seconds, and the waits of all requests.

With ``--program simulated`` servers need no torch, and sizes are in MiB: for the simulated driver (`gpucr sim env`).
Prints a table, last. ``--json`` also has the GPU's memory over time, for the picture in the docs. It takes
``--within`` seconds at most: requests that do not fit in are left out. Exit code 1: an answer is wrong or missing, a
time is beyond its bound, or a step failed or took longer than --limit.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).parent / "programs" / "generating_server.py"
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.hardware.interposed_suspend import Failed, gpucr  # noqa: E402 - found where the checkout is
from tests.lines import complete_lines  # noqa: E402 - found where the checkout is
from tests.ports import lasting_port  # noqa: E402 - found where the checkout is

SEEDS = tuple(range(1, 9))
AWAKE_BOUND_S, ASLEEP_BOUND_S, EVICTION_BOUND_S = 0.002, 0.2, 0.3
_SAMPLE_EVERY_S, _LOOK_EVERY_S, _QUIET_S = 0.1, 0.02, 1.2
_AWAKE_REQUESTS = 40
_OF_GPU, _SLEEPING, _END_LIMIT_S = 0.4, 2.5, 20.0


Sample = tuple[float, int, tuple[str, ...]]
"""When (seconds), bytes of device memory in use, and the servers that are awake."""


@dataclass
class Row:
    """One thing measured: seconds to the first byte, what they may be at most, and whether they are."""

    what: str
    seconds: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
    bound_s: float | None = None
    detail: str = ""

    @property
    def median_s(self) -> float:
        """Of the measurements."""
        return statistics.median(self.seconds)

    @property
    def is_good(self) -> bool:
        """Whether each is within what its suspend and resume took, and the bound."""
        if self.bound_s is None:
            return True
        allowed = self.parts or [0.0] * len(self.seconds)
        return all(each <= part + self.bound_s for each, part in zip(self.seconds, allowed, strict=True))


@dataclass
class Outcome:
    """All that was found. ``memory``: seconds since the begin, bytes in use on the GPU, and who is awake."""

    program: str
    gib: float
    servers: int
    gpu: str = ""
    driver: str = ""
    gpu_bytes: int = 0
    rows: list[Row] = field(default_factory=list)
    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=dict)
    switches: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    memory: list[Sample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing failed."""
        return not self.errors and not self.wrong and all(row.is_good for row in self.rows)


class ModelServer:
    """One server, and its forwarder."""

    def __init__(self, number: int, options: argparse.Namespace, port: int) -> None:
        self.name = f"{'small' if options.small else 'model'}-{number}"
        self.port, self.job_port = port, port + 1
        self.expected: dict[int, str] = {}
        self._options = options

    def start(self, *, lazily: bool) -> None:
        """Listen for it, and start it now or when it is first asked."""
        options = self._options
        words = [sys.executable, str(SERVER), str(self.job_port), str(options.gib), str(options.tokens)]
        if options.program == "simulated":
            words.append("--driver")
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        os.environ["PYTHONPATH"] = path
        gpucr(
            "run", "--json", "--name", self.name, "--network", "host", *options.run_options,
            "--on-demand", f"{self.port}:{self.job_port}", "--http", "--idle", f"{options.idle:g}s",
            "--stay", f"{options.stay:g}s", "--wake-timeout", f"{options.limit:g}s",
            "--start", "lazily" if lazily else "now", "--", *words, limit_s=options.limit,
        )  # fmt: skip

    def ask(self, path: object, *, direct: bool = False) -> tuple[str, float]:
        """The answer, and the seconds until its first byte. Raises Failed."""
        port = self.job_port if direct else self.port
        begun_s = time.monotonic()
        try:
            made = http.client.HTTPConnection("127.0.0.1", port, timeout=self._options.limit)
            with contextlib.closing(made):
                made.request("GET", f"/{path}")
                response = made.getresponse()
                first_s = time.monotonic() - begun_s
                text = response.read().decode().strip()
        except (OSError, http.client.HTTPException) as e:
            raise Failed(f"{self.name} did not answer /{path} after {time.monotonic() - begun_s:.1f} s: {e!r}") from e
        if response.status != 200:
            raise Failed(f"{self.name} answered /{path} with {response.status}: {text}")
        return text, first_s

    def ask_with_curl(self, path: object) -> tuple[str, float]:
        """The same. Raises Failed."""
        done = subprocess.run(
            ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", f"{self._options.limit:g}",
             "--write-out", "\n%{time_starttransfer}", f"http://127.0.0.1:{self.port}/{path}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise Failed(f"curl of {self.name}/{path} ended with {done.returncode}: {done.stderr} {done.stdout}")
        text, _, seconds = done.stdout.rpartition("\n")
        return text.strip(), float(seconds)

    def learn(self) -> None:
        """The right answers, from the server itself, and twice the same. Its forwarder keeps it awake meanwhile."""
        for seed in SEEDS:
            self.ask("health")
            answers = {self.ask(seed, direct=True)[0] for _ in range(2)}
            if len(answers) != 1:
                raise Failed(f"{self.name} does not answer seed {seed} the same twice: {answers}")
            self.expected[seed] = answers.pop()

    def phase(self) -> str:
        """What its forwarder says."""
        from gpucr.on_demand.listing import look

        found = look(self.name)
        return "unknown" if found is None else found.phase

    def wait_phase(self, phase: str) -> None:
        """Until its forwarder says so. Raises Failed."""
        wait(lambda: self.phase() == phase, f"{self.name} to be {phase}: {self.phase()}", self._options.limit)

    def events(self, event: str) -> list[dict[str, Any]]:
        """What its forwarder has told."""
        from gpucr.on_demand.folder import OnDemandFolder

        lines = complete_lines(OnDemandFolder(self.name).events_path)
        return [told for told in map(json.loads, lines) if told["event"] == event]

    def log_end(self) -> str:
        """Its last output."""
        from gpucr.jobs.registered import registry

        listed = registry().look(self.name)
        if listed is None or listed.record is None or not listed.record.log.exists():
            return "it has no log"
        return listed.record.log.read_text(errors="replace")[-600:]


def wait(is_so: Callable[[], bool], what: str, limit_s: float) -> None:
    """Until it is so. Raises Failed where that takes too long."""
    until = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > until:
            raise Failed(f"waited {limit_s:.0f} s for {what}")
        time.sleep(_LOOK_EVERY_S)


class Trial:
    """All steps, one after the other. What fails is in the outcome."""

    def __init__(self, options: argparse.Namespace) -> None:
        from gpucr.driver.gpus import driver_version, list_gpus
        from gpucr.linux.memory import available_bytes

        gpu = list_gpus()[0]
        if options.gib is None:  # two of three may sleep in host memory at a time
            most = min(_OF_GPU * gpu.memory_total_bytes, available_bytes() / _SLEEPING)
            options.gib = 6.0 if options.small else round(most / (1 << 30), 1)
        count = 10 if options.small else 3
        version = driver_version() or "unknown"
        self.outcome = Outcome(options.program, options.gib, count, gpu.name, version, gpu.memory_total_bytes)
        self._options = options
        self._dice = random.Random(7)  # noqa: S311 - the same requests each time
        self._begun_s = time.monotonic()
        self._end_s = self._begun_s + options.within
        port = lasting_port(count=2 * count)
        self.servers = [ModelServer(number, options, port + 2 * number) for number in range(count)]

    def run(self) -> None:
        """Every step, until one fails."""
        steps: Sequence[tuple[str, Callable[[], None]]] = (
            [("start", self._start_all), ("requests", self._requests)]
            if self._options.small
            else [
                ("cold start", self._cold_starts),
                ("awake", self._awake),
                ("asleep", self._asleep),
                ("eviction", self._eviction),
                ("requests", self._requests),
                ("driver", self._driver),
            ]
        )
        with self._memory_watched():
            for name, step in steps:
                begun_s = time.monotonic()
                try:
                    if begun_s > self._end_s:
                        raise Failed(f"{self._options.within:g} s were over before it")
                    step()
                except Exception as e:  # noqa: BLE001 - what was measured before is shown
                    self.outcome.errors.append(f"{name}: {e if isinstance(e, Failed) else repr(e)}")
                    self.outcome.errors += [f"{each.name}: {each.log_end()}" for each in self.servers]
                    return
                finally:
                    self.outcome.seconds[name] = round(time.monotonic() - begun_s, 1)
                    print(f"{name}: {self.outcome.seconds[name]} s", flush=True)

    def _cold_starts(self) -> None:
        """One after the other; the others make room for each, and are then those that sleep."""
        row = Row("cold start, nobody on the GPU")
        more = Row("cold start, others make room")
        for number, server in enumerate(self.servers):
            server.start(lazily=True)
            _, first_s = server.ask("health")
            (more if number else row).seconds.append(first_s)
            server.learn()
        self.outcome.rows += [row, more]

    def _start_all(self) -> None:
        """All at once: there is room."""
        for server in self.servers:
            server.start(lazily=False)
        with ThreadPoolExecutor(len(self.servers)) as threads:
            for each in [threads.submit(server.ask, "health") for server in self.servers]:
                each.result()
        for server in self.servers:
            server.ask("health")
            server.learn()

    def _awake(self) -> None:
        """Direct and forwarded in turns, without the model: its time varies more than the difference."""
        server = self.servers[-1]
        direct, forwarded = Row("awake, without gpucr"), Row("awake", bound_s=AWAKE_BOUND_S)
        server.ask("health")
        for _ in range(_AWAKE_REQUESTS):
            direct.seconds.append(server.ask("health", direct=True)[1])
            forwarded.seconds.append(server.ask("health")[1])
        direct.seconds, forwarded.seconds = [direct.median_s], [forwarded.median_s]
        forwarded.parts = list(direct.seconds)
        self.outcome.rows += [direct, forwarded]

    def _asleep(self) -> None:
        """There is room on the GPU: two are suspended by hand first."""
        row = Row("asleep", bound_s=ASLEEP_BOUND_S)
        server = self.servers[0]
        for seed in SEEDS[: self._options.rounds]:
            for each in self.servers[:2]:
                self._suspend(each)
            text, first_s = server.ask(seed)
            awake_s = server.ask(seed)[1]
            woken = server.events("woken")[-1]
            self._same(server, seed, text)
            row.seconds.append(first_s)
            row.parts.append(woken["seconds"] + awake_s)
        row.detail = f"of it resume {row.parts[-1]:.3f} s"
        self.outcome.rows.append(row)

    def _eviction(self) -> None:
        """All but one are asked; then that one, once they are idle."""
        row = Row("asleep, another makes room", bound_s=EVICTION_BOUND_S)
        for number in range(self._options.rounds):
            last, *others = self._rotated(number)
            self._suspend(last)
            for each in others:
                each.ask("health")
            for each in others:
                if each.phase() != "serving":
                    raise Failed(f"{each.name} is {each.phase()}: there is no room for {len(others)} servers")
            time.sleep(_QUIET_S + self._options.stay)
            before = {each.name: len(each.events("asleep")) for each in others}
            text, first_s = last.ask(SEEDS[0])
            awake_s = last.ask(SEEDS[0])[1]
            self._same(last, SEEDS[0], text)
            slept = [told["seconds"] for each in others for told in each.events("asleep")[before[each.name] :]]
            if not slept:
                raise Failed("nobody made room: --gib is too small for an eviction")
            row.seconds.append(first_s)
            row.parts.append(sum(slept) + last.events("woken")[-1]["seconds"] + awake_s)
        row.detail = f"of it suspend and resume {row.parts[-1]:.3f} s"
        self.outcome.rows.append(row)

    def _driver(self) -> None:
        """The same server by the driver alone."""
        if self._options.skip_driver:
            return
        server, limit_s = self.servers[0], self._options.limit
        self._suspend(self.servers[1])
        server.ask("health")
        times = []
        for words in (("suspend", server.name, "--gpu-state", "driver"), ("resume", server.name)):
            done = gpucr(*words, "--json", limit_s=limit_s)
            times.append(sum(phase["seconds"] for phase in done["phases"]))
        server.wait_phase("serving")
        row = Row("suspend and resume by the driver alone", [sum(times)])
        row.detail = f"suspend {times[0]:.2f} s, resume {times[1]:.2f} s"
        self.outcome.rows.append(row)

    def _requests(self) -> None:
        """From several clients, in random order, with random pauses."""
        options, outcome = self._options, self.outcome
        turns = [(self._dice.choice(self.servers), self._dice.choice(SEEDS)) for _ in range(options.requests)]
        pauses = [self._dice.uniform(0, options.pause) for _ in turns]
        before = self._wakes()
        outcome.waits = {server.name: [] for server in self.servers}
        has_curl = shutil.which("curl") is not None
        if not has_curl:
            print("there is no curl: all clients are Python's", flush=True)
        turn, position, failed = threading.Lock(), iter(range(len(turns))), threading.Event()

        def client(number: int) -> None:
            while True:
                with turn:
                    place = next(position, None)
                if place is None or failed.is_set() or time.monotonic() > self._end_s:
                    return
                server, seed = turns[place]
                time.sleep(pauses[place])
                ask = server.ask_with_curl if has_curl and number % 2 else server.ask
                try:
                    text, first_s = ask(seed)
                except BaseException:
                    failed.set()
                    raise
                with turn:
                    outcome.waits[server.name].append(first_s)
                    outcome.requests += 1
                    self._same(server, seed, text)

        with ThreadPoolExecutor(options.clients) as threads:
            clients: list[Future[None]] = [threads.submit(client, number) for number in range(options.clients)]
            try:
                for each in clients:
                    each.result()
            finally:
                failed.set()  # the others end, too
        outcome.switches = self._wakes() - before
        if outcome.requests != options.requests:
            raise Failed(f"{outcome.requests} of {options.requests} requests were answered within {options.within:g} s")

    def _wakes(self) -> int:
        return sum(len(server.events("woken")) for server in self.servers)

    def _suspend(self, server: ModelServer) -> None:
        """By hand, if it is awake; its forwarder notices."""
        wait(lambda: server.phase() in ("serving", "asleep"), f"{server.name} to rest", self._options.limit)
        if server.phase() == "serving":
            gpucr("suspend", server.name, "--json", limit_s=self._options.limit)
            server.wait_phase("asleep")

    def _same(self, server: ModelServer, seed: int, text: str) -> None:
        if text != server.expected[seed]:
            self.outcome.wrong.append(f"{server.name} seed {seed}: {text[:80]!r}, not {server.expected[seed][:80]!r}")

    def _rotated(self, number: int) -> list[ModelServer]:
        first = number % len(self.servers)
        return [*self.servers[first:], *self.servers[:first]]

    @contextlib.contextmanager
    def _memory_watched(self) -> Iterator[None]:
        """Note the GPU's memory, and who is awake, all the time."""
        from gpucr.driver.gpus import list_gpus, nvml_kept_open

        is_over = threading.Event()

        def watch() -> None:
            with nvml_kept_open():
                while not is_over.wait(_SAMPLE_EVERY_S):
                    gpu = list_gpus()[0]
                    awake = tuple(each.name for each in self.servers if each.phase() in ("serving", "draining"))
                    used_bytes = gpu.memory_total_bytes - gpu.memory_free_bytes
                    self.outcome.memory.append((round(time.monotonic() - self._begun_s, 2), used_bytes, awake))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join(10.0)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def changes(samples: Sequence[Sample]) -> list[Sample]:
    """Without those that show what the one before shows: the same servers awake, and as much memory within 1 GiB."""
    found: list[Sample] = []
    for each in samples:
        if not found or each[2] != found[-1][2] or abs(each[1] - found[-1][1]) >= 1 << 30:
            found.append(each)
    return found


def table(outcome: Outcome) -> str:
    """What was measured, and whether it is within its bounds."""
    lines = [f"{'time to the first byte':42}{'median s':>10}{'at most':>9}  "]
    for row in outcome.rows:
        if row.seconds:
            allowed_s = None if row.bound_s is None else statistics.median(row.parts or [0.0]) + row.bound_s
            bound = f"{'':9}" if allowed_s is None else f"{allowed_s:9.4f}"
            good = "" if row.bound_s is None else "good" if row.is_good else "TOO LONG"
            lines.append(f"{row.what:42}{row.median_s:10.4f}{bound}  {good}  {row.detail}".rstrip())
    every = [each for waits in outcome.waits.values() for each in waits]
    if every:
        lines.append(
            f"{outcome.requests} requests, {outcome.switches} wakes, {len(outcome.wrong)} wrong answers: first byte "
            f"median {statistics.median(every):.3f}, 95 % {percentile(every, 0.95):.3f}, longest {max(every):.3f} s"
        )
        worst = max(outcome.waits, key=lambda name: percentile(outcome.waits[name] or [0.0], 0.95))
        lines.append(f"worst server {worst}: 95 % {percentile(outcome.waits[worst], 0.95):.3f} s")
    lines += [f"WRONG {each}" for each in outcome.wrong[:5]]
    lines += [f"FAILED {each}" for each in outcome.errors]
    return "\n".join(lines)


def end(servers: Sequence[ModelServer], limit_s: float) -> None:
    """End forwarders and servers; what cannot be ended is reported."""
    for words in (("on-demand", "--leave", "--json"), *(("kill", server.name, "--json") for server in servers)):
        with contextlib.suppress(Failed):
            gpucr(*words, limit_s=min(limit_s, _END_LIMIT_S))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, help="weights of each server; default: 40 %% of the GPU, 6 with --small")
    parser.add_argument("--small", action="store_true", help="ten servers that sleep after two seconds")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, help="longest pause before a request; default: 0.2, 1.5 with --small")
    parser.add_argument("--tokens", type=int, default=4, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2, help="of each measurement of a wake")
    parser.add_argument("--stay", type=float, default=1.0, help="seconds of a slice")
    parser.add_argument("--idle", type=float, help="seconds until a server sleeps; default: 600, 2 with --small")
    parser.add_argument("--program", choices=["transformers", "simulated"], default="transformers")
    parser.add_argument("--skip-driver", action="store_true", help="without the driver alone, which takes long")
    parser.add_argument("--limit", type=float, default=100, help="seconds for each step of gpucr, and each request")
    parser.add_argument("--within", type=float, default=420, help="seconds for all steps together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.pause is None:
        options.pause = 1.5 if options.small else 0.2
    if options.idle is None:
        options.idle = 2.0 if options.small else 600.0
    options.run_options = ["--no-isolate"] if options.program == "simulated" else []
    return options


def main() -> int:
    """Try it."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = Path(tempfile.mkdtemp(prefix="gpucr-on-demand-"))
    os.environ["XDG_STATE_HOME"] = str(folder)
    trial = Trial(options)
    try:
        trial.run()
    finally:
        end(trial.servers, options.limit)
        if options.json is not None:
            trial.outcome.memory = changes(trial.outcome.memory)
            options.json.write_text(json.dumps(asdict(trial.outcome), indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        unit = "MiB" if options.program == "simulated" else "GiB"
        where = f"{trial.outcome.gpu}, driver {trial.outcome.driver}"
        print(f"\n{len(trial.servers)} servers of {options.gib:g} {unit} on {where}, {options.rounds} rounds")
        print(table(trial.outcome), flush=True)
    return 0 if trial.outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
