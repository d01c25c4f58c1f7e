"""Models on simulated GPUs, each with a forwarder."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpucr
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry
from gpucr.linux import processes
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.listing import OnDemandJob, look
from gpucr.on_demand.settings import OnDemand
from gpucr.on_demand.start import end_forwarders, serve_on_demand
from gpucr.operations.end_job import end_processes
from tests import command
from tests.counter import DEADLINE_S, wait_until
from tests.lines import complete_lines
from tests.ports import lasting_port

SERVER = Path(__file__).parent / "server.py"
LONG_S = 1000.0


class Model:
    """A server in the registry, and the port of its forwarder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port, self.job_port = lasting_port(count=2), 0
        self.job_port = self.port + 1

    def command(self, mib: int, devices: str) -> list[str]:
        """What runs it."""
        return [sys.executable, "-S", str(SERVER), str(self.job_port), str(mib), devices, self.name]

    @property
    def listen(self) -> str:
        """What its forwarder listens on."""
        return f"{self.port}:{self.job_port}"

    def ask(self, path: str = "/", *, direct: bool = False) -> str:
        """The answer to one request, on a connection of its own."""
        return self.response(path, direct=direct)[1]

    def response(self, path: str = "/", *, direct: bool = False, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """Status and body."""
        made = http.client.HTTPConnection("127.0.0.1", self.job_port if direct else self.port, timeout=timeout_s)
        with contextlib.closing(made):
            made.request("GET", path)
            found = made.getresponse()
            return found.status, found.read().decode().strip()

    def connect(self) -> socket.socket:
        """A connection to its forwarder."""
        return socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)

    @property
    def record(self) -> JobRecord:
        """Its record now."""
        found = registry().find(self.name).record
        assert found is not None
        return found

    @property
    def state(self) -> str:
        """What `gpucr jobs` says."""
        return next((job.state.word for job in gpucr.list_jobs() if job.name == self.name), "unknown")

    @property
    def served(self) -> OnDemandJob:
        """What its forwarder says."""
        found = look(self.name)
        assert found is not None
        return found

    @property
    def phase(self) -> str:
        """What its forwarder does."""
        return self.served.phase

    def wait(self, phase: str) -> None:
        """Until its forwarder says so."""
        wait_until(
            lambda: self.phase == phase, lambda: f"{self.name} to be {phase}: {self.phase}, {self.events()[-5:]}"
        )

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """What its forwarder has told."""
        lines = complete_lines(OnDemandFolder(self.name).events_path)
        return [told for told in map(json.loads, lines) if event in (None, told["event"])]

    def serve(self, **settings: Any) -> int:
        """Start its forwarder."""
        return serve_on_demand(
            self.name, OnDemand((self.listen,), **{"idle_s": LONG_S, "stay_s": 0.2, "http": True, **settings})
        )

    def kill_forwarder(self) -> None:
        """SIGKILL, and wait for its end."""
        found = OnDemandFolder(self.name).running()
        assert found is not None
        processes.send_signal(found, signal.SIGKILL)
        wait_until(lambda: not processes.is_alive(found), "the forwarder to end")


class Models:
    """The models of one test."""

    def __init__(self, folder: Path, gpus: Sequence[str]) -> None:
        self.folder, self.gpus = folder, gpus
        self._ports: list[Model] = []

    def start(
        self, name: str, *, mib: int = 80, devices: str = "0", priority: int = 100, isolate: bool = False,
        faults: str | None = None, **settings: Any,
    ) -> Model:  # fmt: skip
        """A model that runs, and its forwarder."""
        made = self.run(name, mib=mib, devices=devices, priority=priority, isolate=isolate, faults=faults)
        made.serve(**settings)
        return made

    def run(
        self, name: str, *, mib: int = 80, devices: str = "0", priority: int = 100, isolate: bool = False,
        faults: str | None = None,
    ) -> Model:  # fmt: skip
        """A model that runs."""
        made = Model(name)
        variables = {**os.environ, **({} if faults is None else {"GPUCR_SIM_FAULTS": faults})}
        gpucr.run_job(
            made.command(mib, devices), name=name, isolate=isolate, priority=priority, cwd=self.folder,
            environment=variables,
        )  # fmt: skip
        wait_until(lambda: "ready" in made.record.log.read_text(), f"{name} to listen")
        return made

    def later(self, name: str, *options: object, mib: int = 80, isolate: bool = False) -> Model:
        """A model that starts when it is asked. In a network of its own it listens on the port of its forwarder."""
        made = Model(name)
        if isolate:
            made.job_port = made.port
        isolation = "--isolate" if isolate else "--no-isolate"
        done = command.run(
            "run", "--json", "--name", name, isolation, "--on-demand", made.listen, "--http", "--start", "lazily",
            "--cwd", self.folder, *options, "--", *made.command(mib, "0"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return made

    def asleep(self, name: str, **how: Any) -> Model:
        """A model that sleeps. There is room for it at first."""
        made = self.start(name, **how)
        gpucr.suspend(name)
        made.wait("asleep")
        return made

    def close(self) -> None:
        """End what still runs."""
        try:
            end_forwarders(timeout_s=DEADLINE_S)
            for folder in OnDemandFolder.all():
                assert folder.running() is None, f"the forwarder of {folder.name} still runs"
        finally:
            for listed in registry().jobs():
                if listed.record is not None:
                    end_processes(listed.record)
