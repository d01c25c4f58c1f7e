"""Jobs whose processes share device memory under the interposer: driver calls alone, on the simulator."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TextIO

from gpucr.interposer.library import installed, preload_path
from tests.sharing_programs import PRELUDE

_ROOT = """
import json, os, subprocess, sys
told = []
for source, descriptors, reads, writes, variables in json.loads(sys.argv[1]):
    words = [sys.executable, "-c", source, *map(str, descriptors)]
    child = subprocess.Popen(
        words, stdin=reads, stdout=writes, pass_fds=descriptors, env={**os.environ, **variables}
    )
    told.append(child)
print(*[child.pid for child in told], flush=True)
for child in told:
    child.wait()
"""


class Process:
    """One process of a gang. It waits for words where its program says `stop()`."""

    def __init__(self, pid: int, words: TextIO, lines: TextIO) -> None:
        self.pid, self._words, self._lines = pid, words, lines

    def wait(self) -> None:
        """Until it is ready for a word."""
        line = self._lines.readline()
        assert line == "ready\n", line

    def say(self, word: str) -> str:
        """Its answer to the word."""
        self._words.write(word + "\n")
        self._words.flush()
        answer = self._lines.readline().strip()
        self.wait()
        return answer


class SharingGang:
    """A job of these programs, each with a socket to the one before (if there is one) and to the next one.

    ``plain``: the numbers of those that run without the interposer. ``roots``: the job that each belongs to.
    """

    def __init__(
        self, sources: Sequence[str], agents: str, *, plain: Sequence[int] = (), roots: Sequence[int] | None = None
    ) -> None:
        self._opened = ExitStack()
        self.roots: list[int] = []
        pairs = [socket.socketpair() for _ in sources[1:]]
        ends: list[list[int]] = [[] for _ in sources]
        for number, (one, other) in enumerate(pairs):
            ends[number].append(one.fileno())
            ends[number + 1].append(other.fileno())
        interposed = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": agents}
        pipes = [(*os.pipe(), *os.pipe()) for _ in sources]
        specs = [
            (PRELUDE + source, ends[n], pipes[n][0], pipes[n][3], {} if n in plain else interposed)
            for n, source in enumerate(sources)
        ]
        where = roots or [0] * len(sources)
        pids: dict[int, int] = {}
        for root in sorted(set(where)):
            mine = [n for n, each in enumerate(where) if each == root]
            pids |= zip(mine, self._start([specs[n] for n in mine]), strict=True)
        for one, other in pairs:
            one.close()
            other.close()
        self.processes = []
        for n, (reads, words, lines, writes) in enumerate(pipes):
            os.close(reads)
            os.close(writes)
            streams = self._opened.enter_context(os.fdopen(words, "w")), self._opened.enter_context(os.fdopen(lines))
            self.processes.append(Process(pids[n], *streams))
        for each in self.processes:
            each.wait()

    def _start(self, specs: Sequence[tuple[str, list[int], int, int, dict[str, str]]]) -> list[int]:
        numbers = {n for _, ends, reads, writes, _ in specs for n in (*ends, reads, writes)}
        child = subprocess.Popen(
            [sys.executable, "-c", _ROOT, json.dumps(specs)], stdout=subprocess.PIPE, text=True, pass_fds=tuple(numbers)
        )
        self._opened.callback(child.wait)
        self._opened.callback(child.kill)
        self.roots.append(child.pid)
        assert child.stdout is not None
        self._opened.enter_context(child.stdout)
        return [int(word) for word in child.stdout.readline().split()]

    @property
    def pid(self) -> int:
        """The first job's root."""
        return self.roots[0]

    @property
    def pids(self) -> list[int]:
        """Of the processes that use CUDA."""
        return [each.pid for each in self.processes]

    def close(self) -> None:
        """End them: one whose root is killed reads the end of its words, and ends."""
        for each in self.processes:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        self._opened.close()
