"""The ways for device memory to leave its GPU, on which a user can insist (``--gpu-state``)."""

from __future__ import annotations

from typing import Literal, get_args

from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.errors import DriverUnavailable, InvalidRequest, Unsupported
from gpucr.gpu_state.backend import CAPTURED, INTERPOSED
from gpucr.interposer.presence import is_interposed
from gpucr.linux import capabilities

CUSTOM = "custom"

GpuState = Literal["auto", "driver", "captured", "interposed", "custom"]
"""``auto``: for each process the first that works: its interposer, custom storage, captured staging, plain staging."""


def require_possible(gpu_state: str) -> None:
    """Raise InvalidRequest for an unknown way, and Unsupported for one that this user cannot use."""
    if gpu_state not in get_args(GpuState):
        raise InvalidRequest(f"gpu_state is {gpu_state!r}", hint="give one of " + ", ".join(get_args(GpuState)))
    if gpu_state in (CAPTURED, CUSTOM) and not capabilities.can_checkpoint_processes():
        what = "staging cannot be captured" if gpu_state == CAPTURED else "there is no custom storage"
        raise refused(f"{what} without root", "run gpucr as root")


def first_choice(pid: int, driver: Driver) -> GpuState:
    """The way that this running process's device memory would probably go, without asking the process."""
    if is_interposed(pid):
        return "interposed"
    if not capabilities.can_checkpoint_processes():
        return "driver"
    return "custom" if driver.capabilities().custom_storage else "captured"


def no_custom_storage() -> str | None:
    """Why handed-over memory cannot come back here: it can only come back the same way."""
    try:
        has_it = load_driver().capabilities().custom_storage
    except DriverUnavailable:
        return None  # applies to any GPU state
    if not has_it:
        return "this machine's driver has no custom storage, which came with driver 615"
    return None if capabilities.can_checkpoint_processes() else "the driver's custom storage is for root alone"


def may_be_interposed(gpu_state: GpuState) -> bool:
    """Whether interposers may take device memory."""
    return gpu_state in ("auto", INTERPOSED)


def uses_files(gpu_state: GpuState) -> bool:
    """Whether the driver's staging is captured in files."""
    return gpu_state != "driver" and capabilities.can_checkpoint_processes()


def refused(why: str, what_to_do: str) -> Unsupported:
    """The way that the user insists on is not possible."""
    return Unsupported(
        why, hint=f"{what_to_do}, or leave the way to gpucr (`--gpu-state auto`)", code="GPUCR-GPU-STATE"
    )
