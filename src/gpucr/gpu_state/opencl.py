"""The step that takes away what OpenCL has left in checkpointed processes."""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.errors import Unsupported
from gpucr.gang import Gang
from gpucr.gpu_state.staging.attach import traced
from gpucr.linux import inherited, opencl, processes
from gpucr.linux.let_go import replace_devices
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter


class LetGoOfOpenCl:
    """CHECKPOINTED → CHECKPOINTED, without the descriptors and mappings of devices that OpenCL has left.

    From then on OpenCL's calls fail in these processes: with CL_OUT_OF_RESOURCES or -9999 from the driver 580, which
    neither crashes nor disturbs CUDA (measured). So there is nothing to undo. Raises Unsupported for a process that has
    a context, before anything is taken from any.
    """

    name = "opencl"

    def __init__(self, gang: Gang, pids: Sequence[int]) -> None:
        self._gang = gang
        self._pids = pids

    def describe(self) -> str:
        names = ", ".join(map(str, self._pids))
        return f"end what OpenCL has open in process {names}, where its calls fail from then on"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Look at all, then take it away."""
        left = {pid: opencl.left_mappings(pid) for pid in self._pids if processes.read_stat(pid) is not None}
        for pid, mappings in left.items():
            if not opencl.only_looks(mappings):
                raise Unsupported(
                    f"process {pid} uses OpenCL, whose contexts no driver checkpoints",
                    hint="have the program use CUDA alone (OpenMM: the platform CUDA); start it with `gpucr run`, and "
                    "this is known before the job is stopped",
                    code="GPUCR-OPENCL",
                )
        threads = self._gang.restore_threads()
        for pid, mappings in left.items():
            fds = [file.fd for file in processes.open_files(pid) if inherited.NVIDIA_DEVICE.match(file.target)]
            if fds or mappings:
                with traced(threads.get(pid, pid)) as thread:
                    replace_devices(thread, fds, mappings)
                meter.note(f"process {pid} let go of what OpenCL had open: {len(fds)} descriptors; its calls fail now")
        return 0

    def undo(self) -> None:
        """Nothing: the program was not using it."""
