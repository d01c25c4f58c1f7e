"""Every error that gpucr raises, and the exit code that each one gives the commands.

::

    GpucrError                     1   failed; the job is as it was found
    ├── InvalidRequest             2   invalid request
    │   ├── ProcessNotFound            no such process, or it is a zombie
    │   ├── NotACudaProcess            the process has no CUDA context
    │   └── NotPermitted               the caller may not do this to the process
    ├── Unsupported                3   the workload or the machine cannot do it; nothing was changed
    │   └── Busy                       another gpucr works on the job: later it may succeed
    ├── BrokenInstall              4   a part that gpucr needs is missing or broken
    │   ├── DriverUnavailable
    │   ├── CriuUnavailable
    │   └── SimulatorUnavailable
    ├── SnapshotError              5   the stored form is not usable
    │   ├── SnapshotExists             the target already holds something
    │   ├── SnapshotUnfinished         there is no manifest: the dump never ended
    │   ├── SnapshotDamaged            a file is missing, changed, or leads outside
    │   ├── RehearsalFailed            restored to the last step but one, the job did not come back
    │   └── StoreError                 a store of snapshots cannot be used, or is none
    │       ├── WrongKey               the store is encrypted, and not with this key
    │       └── StoreDamaged           something in the store is missing, cut short, or changed
    ├── DeadlineExceeded           6   out of time; the job is as it was found
    ├── DriverError                1   the CUDA driver refused or failed an action
    │   ├── IllegalState               CUDA_ERROR_ILLEGAL_STATE (401)
    │   ├── LockTimeout                CUDA_ERROR_NOT_READY (600)
    │   └── NotSupportedByDriver       CUDA_ERROR_NOT_SUPPORTED (801)
    ├── InterposerError            1   the library in a process did not do what it was asked
    ├── GpuFull                    1   others took the GPU's memory; the job waits for room, nothing of it is lost
    ├── CustomStorageError         1   device memory that the driver hands over could not be taken, or given back
    ├── CriuError                  1   CRIU failed; carries its reason and its log
    ├── JobChanged                 1   the job changed under our hands (a process ended, another tool worked on it)
    │   └── CudaStarted                a process began to use CUDA between discovery and freeze
    ├── JobDamaged                 10  failed, and the job could not be brought back to how it was found
    ├── NodeFailed                 1   another node of a job of several nodes failed, or cannot be reached
    ├── OutputLost                 7   the operation succeeded, but its report could not be printed
    └── Interrupted                130 Ctrl-C or SIGTERM; the job is as it was found

Messages are one sentence that says what is wrong; ``why`` is the cause's own words, ``hint`` says what to do about it.
``code`` names the situation and never changes: each class has one, and a raise site gives a narrower one where users
must tell its situation apart. `gpucr explain CODE` prints what ``error_codes.md`` has about it.
Errors carry the data they were made from (pid, action, result code, path), so that callers need not parse text.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

_HELD = "/proc/self/fd/"
"""Prefix of paths below a folder that is used through its descriptor (linux/held_folder.py)."""

_SAYS_NOTHING = (LookupError, FileNotFoundError, ProcessLookupError)
"""Causes that add nothing: a bare key, or "not found", which the message says already, with the name."""

_PLAIN = (str, bytes, int, float, type(None))
"""What exceptions may have as arguments to be pickled as they are."""


def reason_of(error: BaseException) -> str:
    """What it says. Of an OSError the kernel's words without their number, after the file's name, if it has one."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    return f"{path}: {error.strerror}" if path else error.strerror


class GpucrError(Exception):
    """Base of all errors of gpucr. ``exit_code`` is what the commands end with, ``code`` names the situation."""

    exit_code = 1
    code = "GPUCR-FAILED"
    _why: str | None = None
    """`why` from the process in which the error was raised, if another one: a pool replaces the cause."""

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        self.message = _readable(message)
        super().__init__(self.message)
        self.hint = hint if hint is None else _readable(hint)
        if code is not None:
            self.code = code

    @property
    def why(self) -> str | None:
        """One line: the first cause that says more than the message does; None if there is none."""
        if self._why is not None:
            return self._why
        cause = self.__cause__
        while cause is not None:
            text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
            if text and text not in self.message and not isinstance(cause, _SAYS_NOTHING):
                return text.splitlines()[0]
            cause = cause.__cause__
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle errors (process pools) with all their data and their cause."""
        state = {**self.__dict__, "_why": self.why, "__cause__": _portable(self.__cause__)}
        return _remade, (type(self), self.args), state


class InvalidRequest(GpucrError):
    """Invalid request: a bad option value, gpucr itself as the target, and the like."""

    exit_code = 2
    code = "GPUCR-BAD-REQUEST"


class ProcessNotFound(InvalidRequest):
    """No process has this pid, or only a zombie does."""

    code = "GPUCR-NO-PROCESS"

    def __init__(self, message: str, *, pid: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.pid = pid


class NotACudaProcess(InvalidRequest):
    """The process (or every process of the tree) has no CUDA context."""

    code = "GPUCR-NOT-CUDA"

    def __init__(self, message: str, *, pid: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.pid = pid


class NotPermitted(InvalidRequest):
    """The caller's privileges do not suffice for this process."""

    code = "GPUCR-NOT-PERMITTED"

    def __init__(self, message: str, *, pid: int, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.pid = pid


class Unsupported(GpucrError):
    """The workload or the machine does not support the operation. Nothing was changed."""

    exit_code = 3
    code = "GPUCR-REFUSED"


class Busy(Unsupported):
    """Another gpucr works on the job, or another program holds it. Nothing was changed; later it may succeed."""

    code = "GPUCR-BUSY"


class BrokenInstall(GpucrError):
    """A part that gpucr needs is missing or does not work."""

    exit_code = 4
    code = "GPUCR-BROKEN-INSTALL"


class DriverUnavailable(BrokenInstall):
    """No libcuda.so.1, or one without the checkpoint functions (driver older than 570)."""

    code = "GPUCR-NO-DRIVER"


class CriuUnavailable(BrokenInstall):
    """No working CRIU of the required version."""

    code = "GPUCR-NO-CRIU"


class SimulatorUnavailable(BrokenInstall):
    """The simulated driver cannot be built or is not in place."""

    code = "GPUCR-NO-SIMULATOR"


class SnapshotError(GpucrError):
    """The stored form cannot be used. ``path``: the file or folder."""

    exit_code = 5
    code = "GPUCR-SNAPSHOT"

    def __init__(self, message: str, *, path: str, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.path = _readable(path)


class SnapshotExists(SnapshotError):
    """The target folder already holds something; nothing is ever overwritten."""

    code = "GPUCR-SNAPSHOT-EXISTS"


class SnapshotUnfinished(SnapshotError):
    """There is no manifest: the dump was never completed."""

    code = "GPUCR-SNAPSHOT-UNFINISHED"


class SnapshotDamaged(SnapshotError):
    """A file of the snapshot is missing, differs from its digest, or has a name that leads outside."""

    code = "GPUCR-SNAPSHOT-DAMAGED"


class RehearsalFailed(SnapshotError):
    """The job of a snapshot did not come back in a rehearsal, which has ended what it had restored.

    ``cause_code``: the code of the error that a restore would have.
    """

    code = "GPUCR-REHEARSAL"

    def __init__(self, message: str, *, path: str, cause_code: str, hint: str | None = None) -> None:
        super().__init__(message, path=path, hint=hint)
        self.cause_code = cause_code


class StoreError(SnapshotError):
    """A store of snapshots cannot be used, or there is none. ``path`` names the store, or the object in it."""

    code = "GPUCR-STORE"


class WrongKey(StoreError):
    """The store is encrypted, and the key file or passphrase that was given (if any) does not open it."""

    code = "GPUCR-WRONG-KEY"


class StoreDamaged(StoreError):
    """An object of the store is missing, ends too early, or differs from what was written."""

    code = "GPUCR-STORE-DAMAGED"


class DeadlineExceeded(GpucrError):
    """The operation ran out of time. The job is as it was found."""

    exit_code = 6
    code = "GPUCR-TIMEOUT"


class DriverError(GpucrError):
    """The CUDA driver refused or failed one of the four actions.

    ``result`` is the CUresult, ``state`` the process's state as seen after the failure (None: not known).
    """

    code = "GPUCR-DRIVER"

    def __init__(
        self,
        message: str,
        *,
        pid: int,
        action: str,
        result: int,
        state: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.pid = pid
        self.action = action
        self.result = result
        self.state = state


class IllegalState(DriverError):
    """CUDA_ERROR_ILLEGAL_STATE (401): the action does not fit the process's state. Nothing was changed."""

    code = "GPUCR-ILLEGAL-STATE"


class LockTimeout(DriverError):
    """CUDA_ERROR_NOT_READY (600): the lock's timeout passed with work pending. The process is RUNNING."""

    code = "GPUCR-LOCK-TIMEOUT"


class NotSupportedByDriver(DriverError):
    """CUDA_ERROR_NOT_SUPPORTED (801): the process uses something this driver cannot checkpoint or restore."""

    code = "GPUCR-NOT-SUPPORTED"


class InterposerError(GpucrError):
    """The library in a process (loaded by `gpucr run`) did not do what gpucr asked."""

    code = "GPUCR-INTERPOSER"


class GpuFull(GpucrError):
    """Others took a GPU's memory while the job's was away. Nothing of the job is lost; it waits for room."""

    code = "GPUCR-GPU-FULL"


class CustomStorageError(GpucrError):
    """Device memory that the driver hands over (custom storage, driver 615) could not be taken or given back."""

    code = "GPUCR-CUSTOM-STORAGE"


class CriuError(GpucrError):
    """CRIU failed.

    ``phase`` is dump, restore or check; ``reason`` CRIU's own line; ``log_path`` the log that was kept.
    """

    code = "GPUCR-CRIU"

    def __init__(
        self,
        message: str,
        *,
        phase: str,
        reason: str | None = None,
        log_path: str | None = None,
        hint: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.phase = phase
        self.reason = reason
        self.log_path = log_path

    @property
    def why(self) -> str | None:
        """CRIU's own line, if the message does not contain it."""
        return self.reason if self.reason and self.reason not in self.message else None


class JobChanged(GpucrError):
    """A process of the job ended, or changed its state, while gpucr worked on it. The others are as before."""

    code = "GPUCR-JOB-CHANGED"

    def __init__(self, message: str, *, pids: Sequence[int], hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.pids = tuple(pids)


class CudaStarted(JobChanged):
    """A process began to use CUDA between discovery and freeze. Trying again makes sense."""

    code = "GPUCR-CUDA-STARTED"


class JobDamaged(GpucrError):
    """The job is not as it was found: the undo failed too, or processes were lost.

    ``failures`` says what could not be undone, per step, and which processes have ended, and how, if known. A process
    that exited with 0 meanwhile counts as finished.
    """

    exit_code = 10
    code = "GPUCR-JOB-DAMAGED"

    def __init__(self, message: str, *, failures: Sequence[str], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.failures = tuple(failures)


class NodeFailed(GpucrError):
    """Another node of a job of several nodes failed, or cannot be reached. What was done on this one has been undone.

    ``node``: its number; None: not known which.
    """

    code = "GPUCR-NODE-FAILED"

    def __init__(
        self, message: str, *, node: int | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.node = node


class OutputLost(GpucrError):
    """The operation succeeded, but its report could not be printed. Raised by commands only."""

    exit_code = 7
    code = "GPUCR-OUTPUT-LOST"


class Interrupted(GpucrError):
    """Ctrl-C or SIGTERM ended the operation. What was done has been undone."""

    exit_code = 130
    code = "GPUCR-INTERRUPTED"


def _remade(cls: type[GpucrError], args: tuple[Any, ...]) -> GpucrError:
    return cls.__new__(cls, *args)


def _portable(cause: BaseException | None) -> BaseException | None:
    """The cause, or, if it may be impossible to pickle (those of libraries), one with the same text."""
    if cause is None or isinstance(cause, GpucrError):
        return cause
    if type(cause).__module__ == "builtins" and all(isinstance(each, _PLAIN) for each in cause.args):
        return cause
    return RuntimeError(f"{type(cause).__name__}: {cause}")


def _readable(text: str) -> str:
    """The text with a held folder's real path: the /proc path means nothing elsewhere."""
    head, found, rest = text.partition(_HELD)
    if not found:
        return text
    tail = rest.lstrip("0123456789")
    with contextlib.suppress(OSError):
        return head + os.readlink(found + rest.removesuffix(tail)) + _readable(tail)
    return text
