"""Background work of `gpucr top`: polling the machine, and one operation at a time.

Each has a thread; results reach the screen's thread through a queue.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gpucr.cli.job_table import Kept
from gpucr.cli.top_state import Notice, Operate
from gpucr.diagnosis.preflight import Finding
from gpucr.driver.gpus import nvml_kept_open
from gpucr.errors import GpucrError, JobChanged
from gpucr.linux import processes
from gpucr.model import Gpu, GpuActivity
from gpucr.operations.gpu_jobs import GpuJob, findings_of
from gpucr.operations.suspend import ChangeReport, resume, suspend
from gpucr.quantities import format_bytes
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import Progress


class Seen(Struct, frozen=True):
    """The current jobs and GPUs: each GPU's activity, by UUID, and supervisors' data, by job name."""

    jobs: Sequence[GpuJob]
    gpus: Sequence[Gpu]
    activity: Mapping[str, GpuActivity] = {}
    kept: Mapping[str, Kept] = {}


class Blind(Struct, frozen=True):
    """Polling the machine failed, and why."""

    problem: str


class Judged(Struct, frozen=True):
    """Preflight's findings about a job."""

    pid: int
    findings: tuple[Finding, ...]


class Ended(Struct, frozen=True):
    """The operation is over. ``error``: why it failed; None: it succeeded."""

    operate: Operate
    notice: Notice
    error: BaseException | None = None


News = Seen | Blind | Judged | Progress | Ended
NewsQueue = queue.SimpleQueue[News]


def looked_aside(look: Callable[[], Seen]) -> Seen:
    """Poll in a separate thread, so that Ctrl-C need not wait for a slow driver.

    Raises what it raises.
    """
    found: queue.SimpleQueue[Seen | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            found.put(look())
        except BaseException as e:  # noqa: BLE001 - raised in the thread that waits
            found.put(e)

    threading.Thread(target=work, name="gpucr top: first look", daemon=True).start()
    seen = found.get()
    if isinstance(seen, BaseException):
        raise seen
    return seen


class Watch:
    """Polls the machine every ``interval_s`` seconds, and on request."""

    def __init__(self, news: NewsQueue, look: Callable[[], Seen], interval_s: float) -> None:
        """``look`` may raise GpucrError: that is news too."""
        self._news, self._look, self._interval_s = news, look, interval_s
        self._now = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="gpucr top: watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def look_now(self) -> None:
        """Poll now."""
        self._now.set()

    def stop(self) -> None:
        """End, without waiting for a running poll."""
        self._is_over = True
        self._now.set()

    def _run(self) -> None:
        with nvml_kept_open():
            while not self._is_over:
                self._now.wait(self._interval_s)
                self._now.clear()
                try:
                    self._news.put(self._look())
                except (GpucrError, OSError) as e:
                    self._news.put(Blind(str(e)))


def judge(news: NewsQueue, pid: int) -> None:
    """Run preflight on a job in a separate thread."""
    threading.Thread(
        target=lambda: news.put(Judged(pid, findings_of(pid))), name="gpucr top: preflight", daemon=True
    ).start()


class Work:
    """One operation. The program does not end before the operation, however the screen ends."""

    def __init__(self, news: NewsQueue, operate: Operate) -> None:
        self._news, self._operate = news, operate
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name=f"gpucr top: {operate.action}")
        self._thread.start()

    def cancel(self) -> None:
        """Cancel it; it is undone as soon as it can be interrupted."""
        self._cancellation.cancel()

    def is_over(self, timeout_s: float) -> bool:
        """Whether it has ended or ends within this time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if not processes.is_alive(self._operate.root):
                pid = self._operate.root.pid
                raise JobChanged(f"process {pid} has ended", pids=(pid,), hint="choose another job")
            change = suspend if self._operate.action == "suspend" else resume
            report = change(self._operate.root.pid, on_progress=self._news.put, cancel=self._cancellation)
            self._news.put(Ended(self._operate, Notice((_outcome(report), *_warnings(report)))))
        except GpucrError as e:
            what = f"{self._operate.action} {self._operate.root.pid}: {e.message}"
            lines = (what, f"hint: {e.hint}") if e.hint else (what,)
            self._news.put(Ended(self._operate, Notice(lines, is_error=True), e))
        except BaseException as e:  # noqa: BLE001 - raised by the command when the screen is gone
            self._news.put(Ended(self._operate, Notice((f"{type(e).__name__}: {e}",), is_error=True), e))


def _outcome(report: ChangeReport) -> str:
    states = (f"{change.pid} {change.now.word if change.now is not None else 'ended'}" for change in report.processes)
    moved = f"{format_bytes(report.size_bytes)} moved in " if report.size_bytes else ""
    return f"{', '.join(states)}: {moved}{report.seconds:.1f} s"


def _warnings(report: ChangeReport) -> tuple[str, ...]:
    return tuple(f"warning: {warning}" for warning in report.warnings)
