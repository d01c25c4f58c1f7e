"""The NVIDIA driver: whether it is installed, and which parts of the checkpoint API it has."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import ok
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.driver import gpus
from gpucr.driver.api import DriverCapabilities
from gpucr.driver.cuda import load_driver
from gpucr.errors import DriverUnavailable
from gpucr.quantities import whole_number

_ABOUT = "driver"
_DEVICE = Path("/dev/nvidiactl")
_SHARING_SINCE = 610  # legacy CUDA IPC inside one job: known from reports, not detectable in the library


class DriverFacts(Struct, frozen=True):
    """``version`` is NVML's (None: it has none). ``problem`` and ``hint``: why there is no usable driver.

    ``has_device``: the kernel module has made its device files.
    """

    version: str | None
    capabilities: DriverCapabilities | None
    has_device: bool
    problem: str | None = None
    hint: str | None = None


def look() -> DriverFacts:
    """Load libcuda, without cuInit, and ask NVML for the version."""
    has_device = _DEVICE.exists()
    version = None
    try:
        version = gpus.driver_version()
        return DriverFacts(version, load_driver().capabilities(), has_device)
    except DriverUnavailable as e:
        return DriverFacts(version, None, has_device, e.message, e.hint)


def check(facts: DriverFacts) -> list[Finding]:
    """The driver, then newer features that it lacks."""
    capabilities = facts.capabilities
    if capabilities is None:
        return [_unavailable(facts)]
    cuda = f"{capabilities.cuda_version // 1000}.{capabilities.cuda_version % 1000 // 10}"
    found = [
        ok(
            _ABOUT,
            f"NVIDIA driver {facts.version or 'of unknown version'} can lock, checkpoint, restore and unlock",
            f"CUDA {cuda}; libcuda.so.1 has the checkpoint functions, which came with driver 570",
        )
    ]
    if not capabilities.gpu_map:
        found.append(catalogue.OLD_DRIVER.seen(f"it is of CUDA {cuda}, and the GPU map came with 13.0 (driver 580)"))
    else:
        found.append(ok(_ABOUT, "it can restore to other GPUs", "CUDA 13.0 or newer (driver 580)"))
    found.append(_sharing(facts.version))
    if capabilities.custom_storage:
        found.append(
            ok(
                _ABOUT,
                "it has custom storage: device memory goes to gpucr, without staging",
                "cuGetProcAddress has its functions of CUDA 13.4; gpucr has tried it on a simulated driver only",
            )
        )
    return found


def _sharing(version: str | None) -> Finding:
    branch = whole_number((version or "").partition(".")[0])
    if branch is not None and branch >= _SHARING_SINCE:
        return ok(_ABOUT, "it may bring CUDA IPC inside one job back", "reported of driver 610 and newer")
    return ok(
        _ABOUT,
        "device memory that processes or GPUs share is not expected to come back",
        "CUDA IPC inside one job is reported of driver 610 and newer; the probe measures it",
    )


def _unavailable(facts: DriverFacts) -> Finding:
    is_wanted = facts.has_device or facts.version is not None
    return catalogue.NO_DRIVER.seen(
        f"{_DEVICE} is {'there' if facts.has_device else 'not there'}",
        as_warning=not is_wanted,
        problem=facts.problem or "there is no NVIDIA driver",
        hint=facts.hint or "install NVIDIA driver 570 or newer",
    )
