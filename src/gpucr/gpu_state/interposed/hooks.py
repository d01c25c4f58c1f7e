"""Functions that programs register for before a freeze and after it (`gpucr.before_freeze`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from gpucr.errors import reason_of
from gpucr.gpu_state.recovery import CallAfterRestore
from gpucr.interposer.client import Agent
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Code, Hooks, Refused
from gpucr.model import ProcessId
from gpucr.quantities import counted
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Step

LIMIT_S, _ANSWER_S = 10.0, 2.0
"""How long a process may take for its functions of one kind."""

_NAMES = {Hooks.BEFORE_FREEZE: "before_freeze", Hooks.AFTER_RESTORE: "after_restore"}
AgentOf = Callable[[int], AbstractContextManager[Agent]]
"""The client of a process's agent, for the duration of the block."""


class ProgramHooks:
    """The functions of a gang's programs. ``processes``: those with functions. ``warnings``: what failed."""

    def __init__(self, processes: Sequence[ProcessId], protection: Protection, agent_of: AgentOf) -> None:
        self.processes = tuple(processes)
        self._protection = protection
        self._agent_of = agent_of
        self._is_due = False
        self.warnings: list[str] = []

    def steps_before(self) -> list[Step]:
        """The step before the first one that stops anything, if needed."""
        return [BeforeFreeze(self)] if self.processes else []

    def steps_after(self) -> list[Step]:
        """The step after the last one that lets the job continue."""
        return [AfterRestore(self)] if self.processes else []

    def before(self) -> list[str]:
        """Call them. From here on `after` is due, even if gpucr dies. Returns what failed."""
        self._protection.protect(CallAfterRestore(processes=self.processes))
        self._is_due = True
        return self._call(Hooks.BEFORE_FREEZE)

    def after(self) -> list[str]:
        """Call them if due. Returns what failed."""
        if not self._is_due:
            return []
        self._is_due = False
        failures = self._call(Hooks.AFTER_RESTORE)
        self._protection.withdraw(CallAfterRestore)
        return failures

    def _call(self, which: Hooks) -> list[str]:
        failures = call(which, self.processes, self._agent_of)
        self.warnings += failures
        return failures


class BeforeFreeze:
    """Call the programs' functions. The undo calls those for afterwards."""

    name = "before-freeze"

    def __init__(self, hooks: ProgramHooks) -> None:
        self._hooks = hooks

    def describe(self) -> str:
        """The processes whose hooks will be called."""
        return f"call what {_names(self._hooks.processes)} registered to be called before a freeze"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Call them. Failures are reported and stop nothing."""
        for failure in self._hooks.before():
            meter.note(failure)
        return 0

    def undo(self) -> None:
        self._hooks.after()


class AfterRestore:
    """Call the programs' functions. The job runs already: there is no undo."""

    name = "after-restore"

    def __init__(self, hooks: ProgramHooks) -> None:
        self._hooks = hooks

    def describe(self) -> str:
        """The processes whose hooks will be called."""
        return f"call what {_names(self._hooks.processes)} registered to be called afterwards"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Call them. Failures are reported."""
        for failure in self._hooks.after():
            meter.note(failure)
        return 0

    def undo(self) -> None:
        pass


def has_hooks(pid: int) -> bool:
    """Whether the program has registered functions. Also False if its agent does not answer."""
    if not is_interposed(pid):
        return False
    try:
        with Agent(pid, answer_s=_ANSWER_S, looks=True) as agent:
            return agent.status().hooks > 0
    except (Refused, BadAnswer, OSError):
        return False


def call(which: Hooks, processes: Iterable[ProcessId], agent_of: AgentOf = Agent) -> list[str]:
    """Call these functions in all of these processes at once. Returns what failed instead of raising it."""
    chosen = list(processes)
    if not chosen:
        return []
    with ThreadPoolExecutor(max_workers=len(chosen)) as threads:
        told = threads.map(lambda process: _call_one(which, process.pid, agent_of), chosen)
        return [each for each in told if each is not None]


def call_after_restore(processes: Iterable[ProcessId]) -> None:
    """What a guard does for programs whose functions were called before a freeze."""
    call(Hooks.AFTER_RESTORE, processes)


def _call_one(which: Hooks, pid: int, agent_of: AgentOf) -> str | None:
    name = _NAMES[which]
    try:
        with agent_of(pid) as agent:
            count, failed = agent.call_hooks(which, LIMIT_S)
    except Refused as e:
        if e.code == Code.TOO_SLOW:
            return f"process {pid}: what it registered with {name} takes longer than {LIMIT_S:g} s"
        return f"process {pid}: what it registered with {name} was not called: {e.reason}"
    except (BadAnswer, OSError) as e:
        return f"process {pid}: what it registered with {name} was not called: {reason_of(e)}"
    return f"process {pid}: {failed} of {counted(count, 'function')} of {name} failed" if failed else None


def _names(processes: Sequence[ProcessId]) -> str:
    return ("process " if len(processes) == 1 else "processes ") + ", ".join(str(each.pid) for each in processes)
