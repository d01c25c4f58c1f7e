"""Run a supervisor in this process: set it up, and handle signals."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator

from gpucr import Secret
from gpucr.driver.gpu_failures import watched_gpu_failures
from gpucr.driver.gpus import are_busy
from gpucr.jobs.sidecar import Journal
from gpucr.linux import processes
from gpucr.linux.work import Work
from gpucr.supervise.clock import ORDERS, Clock, MachineClock, Stop
from gpucr.supervise.folder import Phase, SupervisedFolder, SupervisedState
from gpucr.supervise.job import RegisteredJob
from gpucr.supervise.settings import Supervision
from gpucr.supervise.supervisor import Supervisor
from gpucr.supervise.watch import Watch, start_health

_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
"""A shell ignores SIGINT for what a script starts with ``&``, nohup ignores SIGHUP: then they are not for us."""


def read_key(settings: Supervision) -> Secret | None:
    """The key that opens the store. Raises InvalidRequest if the key file cannot be read."""
    return None if settings.key_file is None else Secret.in_file(settings.key_file)


def supervise(
    name: str,
    *,
    stop: Stop | None = None,
    clock: Clock | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> Phase:
    """Supervise a prepared job in this process to the end. Returns what became of the job.

    ``on_ready`` is called after all checks. Raises InvalidRequest if it already has a supervisor, its files are missing
    or damaged, or it may run elsewhere.
    """
    folder = SupervisedFolder(name)
    with folder.held():
        settings = folder.settings()
        job = RegisteredJob(folder.name, settings, read_key(settings))
        job.require_here()
        clock = clock or MachineClock()
        journal = Journal(folder, settings.on_event, clock.wall_s)
        journal.update(process=processes.this_process())
        on_ready()
        return _supervise(job, settings, journal, stop or Stop(), clock)


def _supervise(
    job: RegisteredJob, settings: Supervision, journal: Journal[SupervisedState], stop: Stop, clock: Clock
) -> Phase:
    watch = Watch(job, settings, clock, start_health=start_health, is_busy=are_busy)
    with watched_gpu_failures() as gpu_failures:
        supervisor = Supervisor(
            job, settings, journal, watch,
            clock=clock, random=random.random, stop=stop, gpu_failures=gpu_failures,
        )  # fmt: skip
        return supervisor.run()


_LOOK_EVERY_S = 0.5


def supervise_with_signals(name: str, on_ready: Callable[[], None] = lambda: None) -> Phase:
    """Like `supervise`; SIGTERM drains, SIGUSR1, SIGINT and SIGHUP leave the job running. Call it from the main thread.

    Another thread does the work: otherwise operations would handle the signals.
    """
    stop = Stop()
    with _signals_request(stop):
        work = Work(lambda: supervise(name, stop=stop, on_ready=on_ready), "supervisor", daemon=False)
        # A handler runs only when this thread runs. Without the limit SIGUSR1 stayed unseen until a second one came, in
        # 4 of 10 runs of tests/supervise/test_real_jobs.py; probably the kernel had given it to the other thread.
        while not work.is_done(_LOOK_EVERY_S):
            pass
    return work.wait()


@contextlib.contextmanager
def _signals_request(stop: Stop) -> Iterator[None]:
    before = {}
    for wish, number in ORDERS.items():
        before[number] = signal.signal(number, lambda *_, wish=wish: stop.request(wish))
    for number in _OF_TERMINALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, lambda *_: stop.request("leave"))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
