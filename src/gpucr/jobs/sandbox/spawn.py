"""Start a job with a keeper, or an empty sandbox for a restore."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import Struct

from gpucr.criu.install import CriuInstall
from gpucr.jobs.sandbox.lookup import Sandbox
from gpucr.jobs.sandbox.started import KeeperByHelper, SandboxByHelper, StartedKeeper, identity
from gpucr.linux import processes
from gpucr.linux.namespaces import PidNamespace
from gpucr.model import ProcessId

if TYPE_CHECKING:
    from gpucr.linux.private_view import View

Network = Literal["own", "host"]
"""The network of an isolated job: a loopback of its own, or the machine's network."""


class Started(Struct, frozen=True):
    """A started job: its keeper and its first process, which may have ended by now."""

    keeper: ProcessId
    root: ProcessId


class Program(Struct, frozen=True):
    """What is started: ``command``, which begins with a path, in the folder ``cwd`` with exactly this environment."""

    command: Sequence[str]
    cwd: str
    environment: Mapping[str, str]


def start(
    program: Program,
    *,
    log_path: str,
    status_path: str,
    network: Network = "own",
    isolate: bool = True,
    refuse_io_uring: bool = True,
    ends_with_caller: bool = False,
    before_run: Callable[[Started], None] | None = None,
    helper: CriuInstall | None = None,
) -> Started:
    """Start a job below a keeper of its own, with ``isolate`` in a sandbox.

    It keeps running when the calling process ends; with ``ends_with_caller`` it is killed then.

    The program gets a session of its own, nothing to read, and the file ``log_path`` (appended to; mode 0600 where it
    is made) for its output; no other descriptor. How it ended is written to ``status_path``: ``{"exit_code": N,
    "ended": TIME}``, or ``signal`` instead of ``exit_code``.
    ``isolate`` needs CAP_SYS_ADMIN, or the privileged ``helper`` makes the sandbox, in which nobody gains rights from
    setuid programs; ``refuse_io_uring`` what `gpucr.linux.seccomp` says; anything else needs nothing.
    ``before_run`` is called when both processes are there and nothing of the program has run.

    Raises Unsupported (the namespaces cannot be made), InvalidRequest (the log or the program), BrokenInstall (the
    keeper does not start), and what ``before_run`` raises. Then nothing runs.
    """
    keeper = _keeper(
        _specification(
            log_path,
            status_path,
            ends_with_caller,
            command=list(program.command),
            cwd=program.cwd,
            environment=dict(program.environment),
            network=network if isolate else "host",
            isolate=isolate,
            refuse_io_uring=refuse_io_uring,
        ),
        helper,
    )
    with keeper:
        inner = int(keeper.answer["forked"])
        outer = PidNamespace(keeper.id.pid).outer_pid(inner) if isolate else inner
        root = identity(outer) if outer is not None else None
        if root is None:
            raise keeper.lost()
        started = Started(keeper.id, root)
        if before_run is not None:
            before_run(started)
        keeper.send(go=True)
        keeper.receive("started")
    return started


def empty(
    *,
    log_path: str | None,
    status_path: str | None,
    lineage: str,
    last_pid: int,
    network: Network = "own",
    terminals: bool = False,
    view: View | None = None,
    helper: CriuInstall | None = None,
    ends_with_caller: bool = False,
) -> EmptySandbox:
    """Make a sandbox with nothing in it but its keeper, for a restore. Needs CAP_SYS_ADMIN, or the ``helper``.

    ``log_path`` is only recorded. Pids in it start above ``last_pid``. ``terminals``: it has a /dev/pts of its own.
    ``view``: it sees the machine's file systems so, and a socket in it can have any address; only for a rehearsal.
    Raises Unsupported if the namespaces cannot be made, BrokenInstall.
    """
    return EmptySandbox(
        _keeper(
            _specification(
                log_path,
                status_path,
                ends_with_caller,
                network=network,
                isolate=True,
                lineage=lineage,
                last_pid=last_pid,
                terminals=terminals,
                view=view.asdict() if view is not None else None,
            ),
            helper,
        ),
        lineage=lineage,
        network=network,
        log_path=log_path,
    )


def bare_keeper(
    *, log_path: str | None, status_path: str | None, own_session: bool = True, ends_with_caller: bool = False
) -> BareKeeper:
    """Start a keeper without a sandbox, for a restore. Needs no privileges. Raises BrokenInstall.

    `BareKeeper.wait_ready` is to be called before it is asked for anything: its Python takes a while to start.
    Without ``own_session`` it stays in the caller's session, in a process group of its own, and so does what it spawns:
    for a job that is to be there as well.
    """
    return BareKeeper(StartedKeeper(_specification(log_path, status_path, ends_with_caller, own_session=own_session)))


def helped_keepers(*, log_path: str | None, status_path: str | None, ends_with_caller: bool = False) -> HelpedKeepers:
    """What the privileged helper will become, for a restore by it. Nothing is started yet."""
    return HelpedKeepers(_specification(log_path, status_path, ends_with_caller))


def _specification(
    log_path: str | None, status_path: str | None, ends_with_caller: bool, **given: object
) -> dict[str, object]:
    """Settings for a keeper; by default it waits for a restore, unsandboxed. ``ends_with_caller``: see `start`."""
    return {
        "command": [],
        "log_path": log_path or "",
        "status_path": status_path,
        "network": "host",
        "isolate": False,
        "lineage": uuid.uuid4().hex,
        "last_pid": 0,
        "terminals": False,
        "view": None,
        "own_session": True,
        "ends_with_gpucr": ends_with_caller,
        **given,
    }


def _keeper(specification: Mapping[str, Any], helper: CriuInstall | None) -> StartedKeeper:
    by_helper = helper if specification["isolate"] else None
    keeper = SandboxByHelper(specification, by_helper) if by_helper is not None else StartedKeeper(specification)
    keeper.wait_ready()
    return keeper


W = TypeVar("W", bound="_Waiting")


class _Waiting:
    """A keeper that ends with its maker, together with everything below it, until it is told the job's first process.

    Use as a context manager: without `adopt` everything below it is ended.
    """

    def __init__(self, keeper: StartedKeeper) -> None:
        self._keeper = keeper
        self._is_adopted = False

    @property
    def is_ready(self) -> bool:
        """Whether it has said so. Before that there is nothing below it."""
        return self._keeper.is_ready

    @property
    def id(self) -> ProcessId:
        """The keeper's own identity."""
        return self._keeper.id

    def adopt(self, root_pids: Sequence[int], *, inner_pids: Sequence[int]) -> None:
        """The first of these is the job's first process: from now on the job is independent of the caller.

        It may have ended already: then the keeper has reaped it, and records that. The others are the roots of the
        job's other trees. ``root_pids`` are the caller's pids for them, ``inner_pids`` their own in a sandbox. Raises
        BrokenInstall if the keeper has ended.
        """
        first, *others = self._as_the_keeper_knows(root_pids, inner_pids)
        self._keeper.send(adopt=first, others=others)
        self._keeper.receive("started")
        self._is_adopted = True
        self._keeper.close()

    def _as_the_keeper_knows(self, pids: Sequence[int], inner_pids: Sequence[int]) -> Sequence[int]:
        return pids

    def end(self) -> bool:
        """End everything below it, unless it was adopted. False if something hangs in the kernel."""
        if self._is_adopted:
            return True
        left = self._kill() if self.is_ready else ()
        self._keeper.close()
        return not left

    def _kill(self) -> tuple[ProcessId, ...]:
        if not processes.is_alive(self.id):
            return ()
        # Never stop the keeper itself: if the caller is killed now, it ends the rest.
        left = processes.kill_tree(self.id.pid, including_root=False)
        return (*left, *processes.kill_and_wait([self.id]))

    def __enter__(self: W) -> W:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class EmptySandbox(_Waiting):
    """A sandbox with only its keeper."""

    def __init__(self, keeper: StartedKeeper, *, lineage: str, network: Network, log_path: str | None) -> None:
        super().__init__(keeper)
        self.sandbox = Sandbox(keeper.id, None, lineage, network, log_path)

    def _as_the_keeper_knows(self, pids: Sequence[int], inner_pids: Sequence[int]) -> Sequence[int]:
        return inner_pids

    def _kill(self) -> tuple[ProcessId, ...]:
        return processes.kill_and_wait([self.id])  # the kernel ends the rest, even what is not below it


class BareKeeper(_Waiting):
    """A keeper without a sandbox, below which CRIU makes a job (`criu.service.Parent`)."""

    def wait_ready(self) -> None:
        """Wait until it has started. Raises BrokenInstall."""
        self._keeper.wait_ready()

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        blocked_signals: Sequence[int],
        fds: tuple[int, int],
    ) -> tuple[int, int]:
        """Start a process below it. Returns its pid and a pidfd. Raises OSError, BrokenInstall.

        Its descriptor 3 is a socket, the first of ``fds``; its output goes to the second.
        """
        request = {"command": list(command), "environment": dict(environment), "blocked_signals": list(blocked_signals)}
        request_fd = os.memfd_create("gpucr-spawn", os.MFD_CLOEXEC)
        try:
            with open(request_fd, "wb", closefd=False) as file:
                file.write(json.dumps(request).encode())
            self._keeper.send_fds((request_fd, *fds), spawn=True)
        finally:
            os.close(request_fd)
        answer = self._keeper.receive("spawned", "failed")
        if "failed" in answer:
            raise OSError(answer["failed"], os.strerror(answer["failed"]))
        return int(answer["spawned"]), self._keeper.received_fds[0]

    def exit_code(self, pid: int) -> int:
        """The exit code of an ended process started below it, negative for a signal. Raises BrokenInstall."""
        self._keeper.send(exit_code_of=pid)
        return int(self._keeper.receive("exit_code")["exit_code"])


class HelpedKeeper(_Waiting):
    """The keeper of a job restored by the privileged helper (`helper.client.Keeper`)."""

    def __init__(self, keeper: KeeperByHelper) -> None:
        super().__init__(keeper)
        self._helped = keeper

    def given(self) -> contextlib.AbstractContextManager[tuple[int, int, int]]:
        """The descriptors that it starts with, for a block."""
        return self._helped.given()

    def begun(self) -> None:
        """Connect to it: the helper has become the keeper. Raises BrokenInstall."""
        self._helped.begin()


class HelpedKeepers:
    """The keepers of what the privileged helper has restored, one for each tree, in their order."""

    def __init__(self, specification: Mapping[str, Any]) -> None:
        self._specification = specification
        self._all: list[HelpedKeeper] = []

    def another(self) -> HelpedKeeper:
        """The one of the next tree. How the first tree's first process ends is what is told of the job."""
        own = {} if not self._all else {"log_path": "", "status_path": None}
        self._all.append(HelpedKeeper(KeeperByHelper({**self._specification, **own})))
        return self._all[-1]

    @property
    def id(self) -> ProcessId:
        """The identity of the first that has begun."""
        return next(each.id for each in self._all if each.is_ready)

    def adopt(self, root_pids: Sequence[int], *, inner_pids: Sequence[int]) -> None:
        """Each gets its tree. As `BareKeeper.adopt`."""
        for keeper, root_pid, inner_pid in zip(self._all, root_pids, inner_pids, strict=True):
            keeper.adopt([root_pid], inner_pids=[inner_pid])

    def end(self) -> bool:
        ended = [each.end() for each in self._all]
        return all(ended)
