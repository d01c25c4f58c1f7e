"""What names a job: a tree of processes, or several that are one gang."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpucr.errors import InvalidRequest


@dataclass(frozen=True, init=False)
class JobSelector:
    """A job, by its trees or by its cgroup.

    ``trees``: pids, or names of registered jobs. Each stands for its whole tree; all of them are one job, whose CUDA
    processes are handled as one gang. ``cgroup``: a folder below /sys/fs/cgroup; the job is what runs in that cgroup
    and in those below it, with its descendants. A job is named in one of the two ways: raises InvalidRequest.
    """

    trees: tuple[int | str, ...]
    cgroup: str | None

    def __init__(self, *trees: int | str, cgroup: str | os.PathLike[str] | None = None) -> None:
        if bool(trees) == (cgroup is not None):
            raise InvalidRequest(
                "a job is named by its trees, or by its cgroup", hint="give pids and names, or one cgroup"
            )
        object.__setattr__(self, "trees", trees)
        object.__setattr__(self, "cgroup", os.fspath(cgroup) if cgroup is not None else None)

    @classmethod
    def of(cls, job: int | str | JobSelector) -> JobSelector:
        """The selector that is meant by a pid, or by the name of a registered job."""
        return job if isinstance(job, JobSelector) else cls(job)
