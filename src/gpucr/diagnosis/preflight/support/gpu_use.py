"""How a job uses its GPUs, and those that a restore goes to."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

MIG = Fact(
    what="GPU {gpu} is partitioned (MIG)",
    consequence="no driver is known to checkpoint or restore on a MIG GPU",
    remedy="use a GPU without MIG (`nvidia-smi -i {index} -mig 0` turns it off)",
    code="GPUCR-MIG",
    warning_if="NVML does not tell whether the job uses it",
)
MPS = Fact(
    what="{process} uses its GPU through MPS",
    consequence="no driver is known to checkpoint a client of MPS",
    remedy="start the job without MPS, for example with an empty folder as CUDA_MPS_PIPE_DIRECTORY",
    code="GPUCR-MPS",
)
PROFILER = Fact(
    what="{process} runs under a profiler or checker",
    consequence="it was not measured whether such a process comes back, and its own measurements would be wrong",
    remedy="start the job without it",
    severity="warning",
    kinds=("Nsight", "compute-sanitizer", "cuda-gdb"),
)
CUSTOM_STORAGE = Fact(
    what="device memory of {processes} leaves by the driver's custom storage",
    consequence="what the driver has begun cannot be cancelled: gpucr brings the job back when it fails or is killed, "
    "but where the carrier, the process that the driver handed the memory to, is killed meanwhile they are ended",
    remedy="`--gpu-state captured` goes through the driver's staging, which is slower and has run on hardware",
    severity="warning",
)
NO_GPU = Fact(
    what="the snapshot needs GPU {gpu} ({model})",
    consequence="there is nowhere to put its device memory",
    remedy="let gpucr choose with --gpu auto, or name this machine's GPUs with --gpu-map OLD=NEW",
    code="GPUCR-NO-GPU",
    warning_if="the job held no memory on it",
)
OTHER_MODEL = Fact(
    what="GPU {gpu} is a {model}",
    consequence="the driver restores only to the same kind of GPU",
    remedy="choose a GPU of the same kind with --gpu-map",
    code="GPUCR-OTHER-MODEL",
    case="the job ran on another kind",
)
GPU_FULL = Fact(
    what="GPU {gpu} has {free} free",
    consequence="{missing} are missing; running out would lose the job",
    remedy="end or suspend what uses that GPU, or choose another one with --gpu auto or --gpu-map",
    code="GPUCR-GPU-FULL",
)
OLD_DRIVER = Fact(
    what="this driver cannot restore to other GPUs",
    consequence="it would silently ignore the GPU map, or refuse it after the job was started",
    remedy="install NVIDIA driver 580 (CUDA 13.0) or newer, or restore without a GPU map",
    code="GPUCR-OLD-DRIVER",
)
INTERPOSER_MISSING = Fact(
    what="device memory of the job left by its interposer, and {path} is missing",
    consequence="nothing else can give the processes their device memory back",
    remedy="install the gpucr that the job was started with where it was, or put that file there",
    code="GPUCR-BACKEND",
)
