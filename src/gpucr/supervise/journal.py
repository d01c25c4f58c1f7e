"""A supervisor's reports: the state that others read, and events."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpucr.errors import reason_of
from gpucr.supervise.folder import SupervisedFolder, SupervisedState, as_time

_ON_EVENT_LIMIT_S = 60.0


class Journal:
    """The state and the event log of one job. A full disk, or a command that fails, never stops a supervisor."""

    def __init__(self, folder: SupervisedFolder, wall_s: Callable[[], float], on_event: Sequence[str] = ()) -> None:
        self._folder = folder
        self._wall_s = wall_s
        self._on_event = tuple(on_event)
        self.state: SupervisedState = folder.state()

    def update(self, **changes: Any) -> None:
        """Change members of the state."""
        self.state = replace(self.state, **changes)
        with contextlib.suppress(OSError):
            self._folder.write_state(self.state)

    def count(self, counter: str, what: str) -> None:
        """Increment a counter: ``checkpoints``, ``rehearsals``, ``restores`` or ``restarts``."""
        before: Mapping[str, int] = getattr(self.state, counter)
        self.update(**{counter: {**before, what: before.get(what, 0) + 1}})

    def tell(self, event: str, **fields: Any) -> None:
        """Write an event to the log and to stderr, and pass it to the user's command."""
        told = {"time": as_time(self._wall_s()), "event": event, "job": self._folder.name, "pid": os.getpid(), **fields}
        with contextlib.suppress(OSError):
            self._folder.append_event(told)
        words = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{told['time']} {event} {words}\n")
            sys.stderr.flush()
        if self._on_event:
            threading.Thread(target=self._call, args=(json.dumps(told),), daemon=True).start()

    def _call(self, told: str) -> None:
        try:
            subprocess.run(
                self._on_event,
                input=told + "\n",
                text=True,
                errors="replace",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_ON_EVENT_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as e:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"--on-event {self._on_event[0]}: {reason_of(e)}\n")
