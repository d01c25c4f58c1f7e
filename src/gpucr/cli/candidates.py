"""Shell completions for jobs and GPUs. Loaded only when a shell asks.

Nothing here may fail or be slow: a failed completion is an empty list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from click.shell_completion import CompletionItem

from gpucr.cli.keys import given_key
from gpucr.cli.output import printable
from gpucr.driver.gpus import list_gpus
from gpucr.errors import GpucrError
from gpucr.operations.launch import list_jobs
from gpucr.operations.listing import list_cuda_processes
from gpucr.operations.stores import list_snapshots
from gpucr.quantities import format_bytes

_LONGEST_HELP = 60
_RUNS = ("running", "suspended")


def running_jobs(incomplete: str) -> list[CompletionItem]:
    """The names of this user's jobs that run; if a digit was typed, the pids of the processes that use CUDA."""
    return _jobs(incomplete, also_ended=False)


def all_jobs(incomplete: str) -> list[CompletionItem]:
    """Like `running_jobs`, with jobs that were dumped, have ended, or run elsewhere."""
    return _jobs(incomplete, also_ended=True)


def _jobs(incomplete: str, *, also_ended: bool) -> list[CompletionItem]:
    found = _processes() if incomplete[:1].isdigit() else _names(also_ended=also_ended)
    return [item for item in found if str(item.value).startswith(incomplete)]


def gpus(incomplete: str) -> list[CompletionItem]:
    """``auto``, and the indices and UUIDs of this machine's GPUs."""
    found = [CompletionItem("auto", help="free ones of the same model")]
    with contextlib.suppress(GpucrError):
        for gpu in list_gpus():
            found += [CompletionItem(str(gpu.index), help=gpu.name), CompletionItem(gpu.uuid, help=gpu.name)]
    return [item for item in found if str(item.value).startswith(incomplete)]


def files(incomplete: str) -> list[CompletionItem]:
    """Tells the shell to complete a file itself."""
    return [CompletionItem(incomplete, type="file")]


def folders(incomplete: str) -> list[CompletionItem]:
    """Tells the shell to complete a folder itself."""
    return [CompletionItem(incomplete, type="dir")]


def places(incomplete: str) -> list[CompletionItem]:
    """Folders of snapshots and stores; after ``STORE#`` the names of its snapshots.

    Only for stores in folders: an object store may be far away. An encrypted one is read if the environment names its
    key; there is no prompt.
    """
    store, separator, _ = incomplete.partition("#")
    if "://" in store:
        return []
    if not separator:
        return folders(incomplete)
    found = [CompletionItem(f"{store}#latest", help="the latest snapshot")]
    found += [CompletionItem(f"{store}#{name}", help=what) for name, what in _snapshots(Path(store).expanduser())]
    return [item for item in found if str(item.value).startswith(incomplete)]


def _snapshots(store: Path) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(GpucrError, OSError):
        for each in reversed(list_snapshots(store, key=given_key(None)).snapshots):
            yield each.name or each.id[:8], f"{each.created[:16].replace('T', ' ')}, {format_bytes(each.size_bytes)}"


def _names(*, also_ended: bool) -> Iterator[CompletionItem]:
    with contextlib.suppress(GpucrError):
        for job in list_jobs():
            if also_ended or job.state.word in _RUNS:
                yield CompletionItem(job.name, help=job.state.word)


def _processes() -> Iterator[CompletionItem]:
    with contextlib.suppress(GpucrError):
        for each in list_cuda_processes():
            command = printable(" ".join(each.process.command_line) or each.process.name)
            yield CompletionItem(str(each.process.pid), help=command[:_LONGEST_HELP])
