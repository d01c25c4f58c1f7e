"""What OpenCL has open in a process with CUDA, which the driver's checkpoint leaves there, and CRIU cannot dump.

Who only looks for devices (OpenMM does, to choose among platforms) has 7 descriptors of ``/dev/nvidia*`` and 3 mappings
left: two of 64 KiB that can only be written, and one page to read. With a context there are more, also some to read and
write. (Measured, H100, driver 580.159.)
"""

from __future__ import annotations

from gpucr.linux import inherited, memory
from gpucr.linux.memory import Mapping

LIBRARY = "/libnvidia-opencl.so"
_OF_WHO_LOOKS = ("-w-s", "r--s")


def has_opencl(pid: int) -> bool:
    """Whether its library is loaded. False if the process has ended."""
    return memory.has_mapped(pid, LIBRARY)


def left_mappings(pid: int) -> tuple[Mapping, ...]:
    """What a checkpointed process still has mapped of NVIDIA devices. Raises OSError if it has ended."""
    return tuple(each for each in memory.read_maps(pid) if inherited.NVIDIA_DEVICE.match(each.path))


def only_looks(left: tuple[Mapping, ...]) -> bool:
    """Whether there is no context of OpenCL, by what a checkpoint has left."""
    return all(each.permissions in _OF_WHO_LOOKS for each in left)
