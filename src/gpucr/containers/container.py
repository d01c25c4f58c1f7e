"""A container as its runtime describes it."""

from __future__ import annotations

from msgspec import Struct

from gpucr.containers.record import Runtime
from gpucr.errors import InvalidRequest


class FoundContainer(Struct, frozen=True):
    """``container``: its name for the runtime. ``is_podmans``: made by podman, even if another runtime found it."""

    runtime: Runtime
    container: str
    pid: int
    status: str
    bundle: str
    is_podmans: bool

    def running_pid(self) -> int:
        """Its first process. Raises InvalidRequest if there is none."""
        if self.pid <= 0:
            raise InvalidRequest(
                f"the container {self.container} is {self.status}",
                hint="only a container that runs can be dumped",
                code="GPUCR-RUNTIME",
            )
        return self.pid
