"""The state of `gpucr top`. No terminal, no threads: keys and news go in, commands come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from gpucr.cli.job_table import Kept
from gpucr.diagnosis.preflight import Finding
from gpucr.model import CudaState, Gpu, GpuActivity, ProcessId
from gpucr.operations.gpu_jobs import GpuJob, beside
from gpucr.undo.events import Progress

Action = Literal["suspend", "resume"]

_SUSPENDABLE = (CudaState.RUNNING, CudaState.LOCKED)
_RESUMABLE = (CudaState.LOCKED, CudaState.CHECKPOINTED)


class Operate(Struct, frozen=True):
    """Begin to suspend or resume this tree."""

    action: Action
    root: ProcessId


class Look(Struct, frozen=True):
    """Run preflight on this job."""

    pid: int


class Cancel(Struct, frozen=True):
    """Cancel and undo the running operation."""


class Quit(Struct, frozen=True):
    """Leave."""


Command = Operate | Look | Cancel | Quit


class Question(Struct, frozen=True):
    """A question before acting on a job. ``siblings``: other jobs with the same parent, which can be included."""

    action: Action
    job: GpuJob
    parent: ProcessId | None = None
    siblings: int = 0


class Notice(Struct, frozen=True):
    """The last thing that happened, line by line."""

    lines: tuple[str, ...] = ()
    is_error: bool = False


class TopState:
    """The jobs, the selection, the open question, and the running operation."""

    def __init__(
        self,
        jobs: Sequence[GpuJob],
        gpus: Sequence[Gpu],
        *,
        activity: Mapping[str, GpuActivity] = MappingProxyType({}),
        kept: Mapping[str, Kept] = MappingProxyType({}),
    ) -> None:
        self.jobs, self.gpus, self.activity, self.kept = tuple(jobs), tuple(gpus), activity, kept
        self.selected = 0
        self.question: Question | None = None
        self.findings: tuple[int, tuple[Finding, ...] | None] | None = None
        self.running: Operate | None = None
        self.progress: Progress | None = None
        self.is_cancelled = False
        self.notice = Notice()

    @property
    def job(self) -> GpuJob | None:
        """The selected job; None if there is none."""
        return self.jobs[self.selected] if self.jobs else None

    def take_jobs(
        self,
        jobs: Sequence[GpuJob],
        gpus: Sequence[Gpu],
        *,
        activity: Mapping[str, GpuActivity] = MappingProxyType({}),
        kept: Mapping[str, Kept] = MappingProxyType({}),
    ) -> None:
        """Update the jobs. The selection stays on its job or, if that has ended, on its neighbour."""
        before = self.job
        self.jobs, self.gpus, self.activity, self.kept = tuple(jobs), tuple(gpus), activity, kept
        roots = [job.root.id for job in self.jobs]
        if before is not None and before.root.id in roots:
            self.selected = roots.index(before.root.id)
        self.selected = max(min(self.selected, len(roots) - 1), 0)
        if self.question is not None and self.question.job.root.id not in roots:
            self.notice = Notice((f"job {self.question.job.pid} has ended",))
            self.question = None

    def take_findings(self, pid: int, findings: tuple[Finding, ...]) -> None:
        """Preflight's findings; dropped if another job is selected by now."""
        if self.findings is not None and self.findings[0] == pid:
            self.findings = pid, findings

    def take_progress(self, progress: Progress) -> None:
        """The operation's progress. Notes are not shown."""
        if progress.event != "note":
            self.progress = progress

    def ended(self, notice: Notice) -> None:
        """The operation is over."""
        self.running, self.progress, self.is_cancelled = None, None, False
        self.notice = notice

    def press(self, key: str) -> Command | None:
        """Handle a key."""
        if self.running is not None:
            return self._press_while_running(key)
        if self.question is not None:
            return self._answer(self.question, key)
        if key in _MOVES:
            self.selected = max(min(self.selected + _MOVES[key], len(self.jobs) - 1), 0)
            self.findings = None
            return None
        if key in ("q", "escape"):
            return Quit()
        if key in ("s", "r", "c") and self.job is not None:
            return self._begin(key, self.job)
        return None

    def _press_while_running(self, key: str) -> Command | None:
        if key == "x" and not self.is_cancelled:
            self.is_cancelled = True
            return Cancel()
        return None

    def _begin(self, key: str, job: GpuJob) -> Command | None:
        self.notice = Notice()
        if key in ("s", "r"):
            action: Action = "suspend" if key == "s" else "resume"
            if not set(job.states) & set(_SUSPENDABLE if key == "s" else _RESUMABLE):
                self.notice = Notice((f"job {job.pid} is {job.state_word}: there is nothing to {action}",))
                return None
            siblings = beside(job, self.jobs)
            self.question = Question(action, job, job.parent if siblings else None, len(siblings))
            if action == "resume":
                return None
        self.findings = job.pid, None
        return Look(job.pid)

    def _answer(self, question: Question, key: str) -> Command | None:
        root = question.job.root.id if key == "y" else question.parent if key == "p" else None
        if root is not None:
            self.running = Operate(question.action, root)
        elif key not in ("n", "q", "escape"):
            return None
        self.question = self.findings = None
        return self.running


_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -10, "page-down": 10, "home": -(1 << 30), "end": 1 << 30}
