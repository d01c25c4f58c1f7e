"""A batch system that starts one job on several nodes, one `gpucr batch` on each: namespaces, and Slurm's variables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import command
from tests.counter import DEADLINE_S, kill_at_once, processes_in, wait_until
from tests.nodes.full_load import LOAD, LoadedNodes

CONNECTIONS = 8
_ESTABLISHED = "01"


class OneJob(LoadedNodes):
    """A job with a part on each of ``count`` nodes, which talk over connections where every byte is checked.

    A start is one of all its parts. What they print is appended to ``out-PART`` and ``errors-PART``.
    """

    def __init__(self, folder: Path, count: int = 2, *, spare: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, count, spare=spare)
        shutil.rmtree(self.store)  # the first start makes it
        for node in self.parts():
            node.output = folder / f"out-{node.number}"
        self.python: Sequence[str] = (sys.executable, "-I", "-S")
        self.starts = 0
        self.tasks: dict[int, subprocess.Popen[str]] = {}
        addresses = {"4": [node.addresses["4"] for node in self.parts()]}
        self.programs: list[Sequence[str]] = [
            ("-c", LOAD, str(part), str(count), str(CONNECTIONS), json.dumps(addresses)) for part in range(count)
        ]
        self.stores: dict[int, Path | str] = dict.fromkeys(range(count), self.store)
        """That of each part."""
        self.key_words: Sequence[object] = ()
        """Options that open the store."""
        self.changed: dict[str, str | None] = {}
        """Slurm's variables that are not as they should be."""

    def store_at(self, url: str) -> None:
        """Have the store there."""
        self.stores = dict.fromkeys(self.stores, url)

    def start(
        self,
        *options: object,
        at: Sequence[int] | None = None,
        parts: Sequence[int] | None = None,
        numbered: bool = False,
    ) -> None:
        """Start all parts, or these, on these machines. ``numbered``: with ``--node``."""
        self.at = list(at or self.at)
        self.tasks = {}
        for part in range(self.count) if parts is None else parts:
            self.tasks[part] = self._start(part, *options, *(("--node", part) if numbered else ()))
        self.starts += 1

    def _start(self, part: int, *options: object) -> subprocess.Popen[str]:
        machine = self.machines[self.at[part]]
        variables: dict[str, str | None] = {
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(part),
            "SLURM_STEP_NUM_TASKS": str(self.count),
            "SLURM_STEP_NUM_NODES": str(self.count),
            "SLURM_STEP_NODELIST": ",".join(self.machines[each].addresses["4"] for each in self.at),
            "SLURM_RESTART_COUNT": str(self.starts),
            "XDG_STATE_HOME": str(machine.folder / "state"),
            **self.changed,
        }
        words = ["--one-job", "--to", self.stores.get(part, self.store), "--on", "URG", *options, "--"]
        program = [*self.python, *self.programs[part]]
        with self.parts()[part].output.open("ab") as out, (self.folder / f"errors-{part}").open("ab") as errors:
            return subprocess.Popen(
                [*machine.enter(), *command.command("batch", *words, *program)],
                env={**os.environ, **{name: value for name, value in variables.items() if value is not None}},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                text=True,
                cwd=self.parts()[part].folder,
                start_new_session=True,
            )

    def said(self, part: int | None = None) -> str:
        """What `gpucr batch` has said on a node, or on all."""
        parts = range(self.count) if part is None else [part]
        paths = [self.folder / f"errors-{each}" for each in parts]
        return "".join(path.read_text() for path in paths if path.exists())

    def wait_for(self, text: str, times: int = 1, part: int | None = None) -> None:
        """Wait until it has said this so often."""
        wait_until(lambda: self.said(part).count(text) >= times, lambda: f"{text!r} in {self.said(part)}")

    def in_contact(self) -> bool:
        """Whether another node has a connection to node 0's `gpucr batch`."""

        def look() -> bool:
            lines = Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]
            ends = [(int(line.split()[1].rpartition(":")[2], 16), line.split()[3]) for line in lines]
            return any(20_000 <= port < 30_000 and state == _ESTABLISHED for port, state in ends)

        return bool(self.machines[self.at[0]].run_inside(look))

    def wait_for_ears(self, part: int) -> None:
        """Wait until the `gpucr batch` of a part catches the signal that announces the end."""

        def listens() -> bool:
            lines = Path(f"/proc/{self.tasks[part].pid}/status").read_text().splitlines()
            caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
            return bool(caught >> (signal.SIGURG - 1) & 1)

        wait_until(listens, "gpucr to listen")

    def signal(self, *parts: int, number: signal.Signals = signal.SIGURG) -> None:
        """Send it to the `gpucr batch` of these parts, or of all."""
        for part in parts or self.tasks:
            self.tasks[part].send_signal(number)

    def codes(self) -> list[int]:
        """The exit codes of the last start, which ends."""
        try:
            return [task.wait(DEADLINE_S) for task in self.tasks.values()]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said()}") from None

    def lose_power(self, part: int) -> None:
        """End all of a part's node at once; nobody gets a word of it."""
        self.machines[self.at[part]].cut_off()
        kill_at_once([*processes_in(self.parts()[part].folder), self.tasks[part].pid])

    def nothing_runs(self) -> None:
        """No process of the job is left on any node, and nothing is blocked."""
        wait_until(lambda: not any(processes_in(node.folder) for node in self.machines), "the job to end")
        self.nothing_is_blocked()

    def sets(self) -> set[tuple[str, bool]]:
        """The sets in the store, each with whether it is complete."""
        found: list[dict[str, Any]] = command.run_json("ls", self.stores[0], *self.key_words)["snapshots"]
        return {(each["part"]["set_id"], each["complete"]) for each in found}

    def close(self) -> None:
        for task in self.tasks.values():
            if task.poll() is None:
                task.kill()
            task.wait(DEADLINE_S)
        wait_until(lambda: not any(processes_in(node.folder) for node in self.machines), "the job to end")
        super().close()
