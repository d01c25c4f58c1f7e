"""Job selectors: one process tree, or several that form one gang."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpucr.errors import InvalidRequest


@dataclass(frozen=True, init=False)
class JobSelector:
    """Selects a job by its trees or by its cgroup.

    ``trees``: pids, or names of registered jobs. Each means its whole tree; together they are one job, whose CUDA
    processes form one gang. ``cgroup``: a folder below /sys/fs/cgroup; the job is everything in that cgroup and those
    below it, with descendants. Raises InvalidRequest unless exactly one of the two is given.
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
        """The selector for a pid or the name of a registered job."""
        return job if isinstance(job, JobSelector) else cls(job)
