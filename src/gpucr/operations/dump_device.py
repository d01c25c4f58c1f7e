"""What a dump does with the device memory of a job that runs. A job without CUDA is dumped without loading this."""

from __future__ import annotations

from gpucr.diagnosis import preflight
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.gang.holdable import Others
from gpucr.gpu_state.cuda_work import CudaWork, Purpose, cuda_work
from gpucr.gpu_state.held import CudaJob
from gpucr.gpu_state.ways import may_be_interposed
from gpucr.jobs import selection
from gpucr.operations.first_pass import first_pass
from gpucr.operations.freeze_steps import findings_of_spool
from gpucr.operations.requests import DumpRequest
from gpucr.snapshot.destination import DumpTarget
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Step


class DeviceOfDump:
    """What was seen of it before any change. ``size_bytes``: with what suspended processes keep in files."""

    def __init__(self, found: selection.FoundJob, request: DumpRequest) -> None:
        self._found = found
        self._request = request
        self._seen = CudaJob.seen(found.job, found.require_cuda())
        self.size_bytes = self._seen.held_bytes + preflight.kept_bytes(found.job)

    def work(
        self, protection: Protection, writer: DeviceWriter, deadline: float | None, others: Others | None
    ) -> CudaWork:
        """Its way off the GPU and back. ``others``: ranks on other nodes, which are held at the same time."""
        gently = self._request.leave_running and self._request.persist == "background"
        purpose = Purpose(deadline, gently, self._request.gpu_state, others=others)
        return cuda_work(self._seen, protection, writer, purpose)

    def findings(self, work: CudaWork, target: DumpTarget) -> list[preflight.Finding]:
        """What speaks against it. If host memory is short, the work goes by way of a disk from now on."""
        found, job = self._found, self._found.job

        def needs() -> list[preflight.MemoryNeed]:
            return preflight.needs_of_dump(
                self._seen.held, target.disk, job.pids, target.buffers_bytes, work.on_gpu, found.look
            )

        may_share = may_be_interposed(self._request.gpu_state)
        return [
            *findings_of_spool(work, needs(), target.disk),
            *selection.findings_before_freeze(job, needs()),
            *findings_of_traps(job, self._seen.driver, self._seen.uses, may_share=may_share),
            *preflight.check_handed_over(work.custom.pids(job.gang)),
        ]

    def steps_before(self, work: CudaWork, writer: DeviceWriter, deadline: float | None) -> list[Step]:
        """The steps before the first one that stops anything."""
        allocate = work.allocate(leave_running=self._request.leave_running)
        return [*first_pass(work, writer, self._request.share, deadline), allocate]
