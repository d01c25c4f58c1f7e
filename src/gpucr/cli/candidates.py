"""What a shell may complete where a command takes a job or a GPU. Loaded only when a shell asks.

Nothing here may fail or ask much: a completion that cannot be made is an empty list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from click.shell_completion import CompletionItem

from gpucr.cli.output import printable
from gpucr.driver.gpus import list_gpus
from gpucr.errors import GpucrError
from gpucr.operations.launch import list_jobs
from gpucr.operations.listing import list_cuda_processes

_LONGEST_HELP = 60


def jobs(incomplete: str) -> list[CompletionItem]:
    """The names of this user's jobs; where a digit was typed, the pids of the processes that use CUDA."""
    found = _processes() if incomplete[:1].isdigit() else _names()
    return [item for item in found if str(item.value).startswith(incomplete)]


def gpus(incomplete: str) -> list[CompletionItem]:
    """``auto``, and the indices and UUIDs of this machine's GPUs."""
    found = [CompletionItem("auto", help="free ones of the same model")]
    with contextlib.suppress(GpucrError):
        for gpu in list_gpus():
            found += [CompletionItem(str(gpu.index), help=gpu.name), CompletionItem(gpu.uuid, help=gpu.name)]
    return [item for item in found if str(item.value).startswith(incomplete)]


def _names() -> Iterator[CompletionItem]:
    with contextlib.suppress(GpucrError):
        for job in list_jobs():
            yield CompletionItem(job.name, help=job.state.word)


def _processes() -> Iterator[CompletionItem]:
    with contextlib.suppress(GpucrError):
        for each in list_cuda_processes():
            command = printable(" ".join(each.process.command_line) or each.process.name)
            yield CompletionItem(str(each.process.pid), help=command[:_LONGEST_HELP])
