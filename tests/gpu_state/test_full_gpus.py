"""Jobs that fill their GPU, again and again, and GPUs that others fill meanwhile.

The simulated GPU has 64 MiB, and each context takes 8 of them: gpucr's own is in the way, as the 523 MiB of a real
one are. A job that fills 98 % leaves no room for it beside the job.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import list_gpus
from gpucr.errors import GpuFull, InterposerError
from gpucr.gang import Gang
from gpucr.gpu_state import room, suspended
from gpucr.interposer.client import ask_status
from gpucr.interposer.library import installed, preload_path
from gpucr.linux import processes
from gpucr.model import CudaState, GangMember, Gpu, GpuUse
from tests import command
from tests.command import python
from tests.conftest import MakeMachine
from tests.counter import Counter, CounterFactory, wait_until
from tests.storm import IS_STORM, later, sample

GPU_MIB, CONTEXT_MIB = 64, 8
FILLS = {0.6: 30, 0.9: 48, 0.98: 54}
"""How full the GPU is, and how many MiB the program has of it beside its context."""

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only", "state_home")]

GPUCR = f"""
import sys
from gpucr.interposer import vault
vault.VAULT_BYTES, vault.ROOMY_BYTES = ({CONTEXT_MIB} << 20) + 512, 2 * {CONTEXT_MIB} << 20
from gpucr.gpu_state.interposed import suspended
suspended.VAULT_BYTES = vault.VAULT_BYTES
"""
COMMAND = GPUCR + "import runpy\nrunpy.run_module('gpucr', run_name='__main__')\n"
FREEZE = GPUCR + "import gpucr\nwith gpucr.freeze(int(sys.argv[1])): pass\n"

SCRIPT = Path(__file__).parents[2] / "scripts" / "cuda-checkpoint"

Start = Callable[..., Counter]


@pytest.fixture
def full(machine: MakeMachine, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Start a counter with so many MiB on the small GPU."""
    monkeypatch.setenv("GPUCR_SIM_CONTEXT_MIB", str(CONTEXT_MIB))
    machine(f"1x{GPU_MIB}MiB")

    def start(mib: int, *more: str, faults: str = "") -> Counter:
        variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
        return counter("--mib", str(mib), *more, env={**variables, "GPUCR_SIM_FAULTS": faults})

    return start


Ran = subprocess.CompletedProcess[str]


class Work:
    """Operations on one job, in any order; after each of them it must be right."""

    def __init__(self, job: Counter, folder: Path, before: str = "") -> None:
        self.job = job
        self.folder = folder
        self.expected = 100
        self._before = before

    def gpucr(self, *words: object) -> Ran:
        return python(self._before + COMMAND, *words)

    def must(self, *words: object) -> None:
        done = self.gpucr(*words)
        assert done.returncode == 0, done.stderr

    def check(self) -> None:
        self.expected += 1
        assert self.job.send("verify") == "ok"
        assert self.job.ask() == self.expected
        status = ask_status(self.job.pid)
        assert status is not None
        assert (status.stuck, status.captive, status.away) == (0, 0, 0)

    def leave_in_a_folder(self) -> None:
        self.must("dump", self.job.pid, "--to", self.folder / "left", "--leave-running", "--gpu-state", "interposed")
        shutil.rmtree(self.folder / "left")

    def leave_in_a_store(self) -> None:
        self.must("dump", self.job.pid, "--to", self.folder / "store", "--leave-running", "--gpu-state", "interposed")

    def suspend(self) -> None:
        self.must("suspend", self.job.pid, "--gpu-state", "interposed")
        self.must("resume", self.job.pid)

    def freeze(self) -> None:
        done = python(self._before + FREEZE, self.job.pid)
        assert done.returncode == 0, done.stderr

    def dump(self) -> None:
        self.must("dump", self.job.pid, "--to", self.folder / "s")
        self._restore()

    def dump_suspended(self, *, is_noted: bool = True) -> None:
        self.must("suspend", self.job.pid)
        self.must("dump", self.job.pid, "--to", self.folder / "s")
        self._restore()
        for pid in self.job.processes() if not is_noted else ():
            suspended.forget(processes.describe(pid).id)
        self.must("resume", self.job.pid)

    def _restore(self) -> None:
        self.job.reap()
        self.must("restore", self.folder / "s")
        shutil.rmtree(self.folder / "s")

    @property
    def all(self) -> list[Callable[[], None]]:
        return [
            self.leave_in_a_folder, self.suspend, self.freeze, self.dump, self.leave_in_a_store, self.dump_suspended,
        ]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> None:
    assert command.run("store", "init", tmp_path / "store").returncode == 0


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("fill", [later(0.6), 0.9, 0.98])
def test_each_thing_three_times_in_a_row(fill: float, full: Start, tmp_path: Path) -> None:
    work = Work(full(FILLS[fill]), tmp_path)
    for one in work.all if IS_STORM else work.all[:4]:
        for _ in range(3):
            one()
            work.check()


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_job_that_was_dumped_while_it_was_suspended(is_noted: bool, full: Start, tmp_path: Path) -> None:
    """Also where nobody has a record of what the restored processes will need beside what they keep."""
    work = Work(full(FILLS[0.98]), tmp_path)
    for _ in range(2):
        work.dump_suspended(is_noted=is_noted)
        work.check()


LATE = """
import threading
from gpucr.gpu_state import returns
from gpucr.gpu_state.interposed import restored
asked, make_way, init = threading.Event(), returns.Returns.make_way, restored.BlocksDestination.__init__
def asking(*given):
    asked.set()
    make_way(*given)
def late(*given):
    assert asked.wait(60)
    init(*given)
returns.Returns.make_way, restored.BlocksDestination.__init__ = asking, late
"""
"""A gpucr whose threads get to the GPU only when the driver is about to bring its part back: on a busy machine."""


def test_a_restore_on_a_busy_machine(full: Start, tmp_path: Path) -> None:
    work = Work(full(FILLS[0.98]), tmp_path, LATE)
    work.check()
    work.dump()
    work.check()


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("seed", range(200) if IS_STORM else range(1))
def test_random_sequences(seed: int, full: Start, tmp_path: Path) -> None:
    chance = random.Random(seed)  # noqa: S311
    work = Work(full(FILLS[0.98] if seed % 2 == 0 else chance.randrange(14, 54)), tmp_path)
    for _ in range(20 if IS_STORM else 6):
        chance.choice(work.all)()
        work.check()


def test_two_processes_that_fill_a_gpu_together(full: Start, tmp_path: Path) -> None:
    work = Work(full(22, "--fork", "1"), tmp_path)
    for one in work.all[:4]:
        for _ in range(2):
            one()
            work.check()


def test_memory_that_came_back_counts_although_nvml_does_not_count_it(full: Start, tmp_path: Path) -> None:
    def held() -> object:
        return next(each for each in command.run_json("ps")["processes"] if each["pid"] == work.job.pid)["device_bytes"]

    work = Work(full(30), tmp_path)
    before = held()
    for _ in range(2):
        work.leave_in_a_folder()
        assert held() == before
        work.suspend()
        assert held() == before


# --- what the driver must not get ------------------------------------------------------------------------------------


@pytest.fixture
def returned(full: Start, tmp_path: Path) -> Counter:
    """A job whose memory has come back to it: the driver takes it for another one's."""
    job = full(FILLS[0.98])
    Work(job, tmp_path).leave_in_a_folder()
    status = ask_status(job.pid)
    assert status is not None
    assert status.foreign > 0
    return job


@pytest.mark.parametrize("way", ["driver", "captured"])
def test_the_drivers_way_is_refused(way: str, returned: Counter, tmp_path: Path) -> None:
    insist = ("--gpu-state", way)
    for words in (
        ("suspend", returned.pid, *insist),
        ("suspend", returned.pid, *insist, "--force"),
        ("suspend", returned.pid, *insist, "--dry-run"),
        ("dump", returned.pid, "--to", tmp_path / "s", *insist),
        ("dump", returned.pid, "--to", tmp_path / "s", *insist, "--leave-running", "--force"),
        ("dump", returned.pid, "--to", tmp_path / "s", *insist, "--dry-run"),
    ):
        done = command.run(*words)
        assert (done.returncode, "of imported device memory" in done.stderr) == (3, True), (words, done.stderr)
        assert returned.send("verify") == "ok"


def test_the_driver_is_not_asked_even_if_nothing_before_has_noticed(returned: Counter, driver: CudaDriver) -> None:
    """The last check stands before each checkpoint of a gang, that of an undo or of a guard too."""
    gang = Gang(driver, [GangMember(processes.describe(returned.pid).id, CudaState.RUNNING)])
    gang.lock()
    with pytest.raises(InterposerError, match="imported memory, which the driver cannot restore") as caught:
        gang.checkpoint()
    assert caught.value.code == "GPUCR-IMPORTED-MEMORY"
    gang.unlock(down_to=lambda member: CudaState.RUNNING)
    assert returned.send("verify") == "ok"


def test_the_drop_in_cuda_checkpoint_refuses_it_too(returned: Counter) -> None:
    for words in (["--toggle"], ["--action", "lock"], ["--action", "checkpoint"], ["--action", "unlock"]):
        line = [sys.executable, str(SCRIPT), *words, "--pid", str(returned.pid)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if words[-1] in ("--toggle", "checkpoint"):
            assert (done.returncode, "operation not supported" in done.stderr) == (1, True), (words, done.stderr)
        else:
            assert done.returncode == 0, done.stderr
    assert returned.send("verify") == "ok"


NO_CUDA = """
from gpucr.interposer import vault
def fails(self): raise vault.VaultFailed("cuInit gave 999 in gpucr's own process", result=999)
vault.Vaults.prepare = fails
"""


def test_gpucr_that_cannot_use_cuda_itself_refuses_before_anything_is_stopped(
    returned: Counter, tmp_path: Path
) -> None:
    done = Work(returned, tmp_path, NO_CUDA).gpucr("suspend", returned.pid)
    assert done.returncode == 3
    assert "GPUCR-IMPORTED-MEMORY" in done.stderr
    assert "cuInit gave 999" in done.stderr
    work = Work(returned, tmp_path)
    work.suspend()
    work.check()


# --- strangers, and calls that fail ----------------------------------------------------------------------------------

STRANGER = """
import ctypes, sys, time
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
cuda.cuInit(0)
if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0:
    cuda.cuCtxSetCurrent(context)
    for mib in (16, 4, 1):
        while cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(mib << 20)) == 0:
            pass
print("full", flush=True)
time.sleep(float(sys.argv[1]))
"""

IN_BETWEEN = """
import subprocess, sys
from gpucr.gang import Gang
from gpucr.interposer.client import Agent
from gpucr.gpu_state import order
from gpucr.gpu_state.order import Order
class Stranger:
    met = []
def meet(seconds):
    stranger = subprocess.Popen([sys.executable, "-c", {stranger!r}, str(seconds)], stdout=subprocess.PIPE)
    stranger.stdout.readline()
    Stranger.met.append(stranger)  # it leaves by itself
real = {owner}.{name}
def in_between(self, *words, **named):
    if {before} and not Stranger.met:
        meet({seconds})
    result = real(self, *words, **named)
    if not {before} and not Stranger.met:
        meet({seconds})
    return result
{owner}.{name} = in_between
"""

MOMENTS = [
    ("Gang", "lock", True),
    ("Agent", "drop", True),
    ("Agent", "drop", False),
    ("Gang", "checkpoint", True),
    ("Gang", "checkpoint", False),
    ("Gang", "restore", True),
    ("Gang", "unlock", True),
    ("Agent", "give_back", True),
    ("Agent", "give_back", False),
]
"""Not between gpucr's last look and the driver's restore, which would lose the job."""


@pytest.mark.parametrize("moment", sample(MOMENTS, 2), ids=lambda moment: "-".join(map(str, moment)))
@pytest.mark.parametrize("what", ["leave_in_a_folder", "suspend", "freeze"])
def test_a_gpu_that_others_fill_at_any_moment(
    what: str, moment: tuple[str, str, bool], full: Start, tmp_path: Path
) -> None:
    """The job waits for them to leave, and continues as it was."""
    owner, name, before = moment
    code = IN_BETWEEN.format(stranger=STRANGER, owner=owner, name=name, before=before, seconds=0.5)
    job = full(38)
    work = Work(job, tmp_path, code)
    operations: dict[str, Callable[[], Ran]] = {
        "leave_in_a_folder": lambda: work.gpucr("dump", job.pid, "--to", tmp_path / "left", "--leave-running"),
        "suspend": lambda: work.gpucr("suspend", job.pid),
        "freeze": lambda: python(code + FREEZE, job.pid),
    }
    done = operations[what]()
    assert done.returncode in (0, 1), done.stderr
    wait_until(lambda: free_mib() > 14, "the stranger to leave")
    if command.run_json("state", job.pid)["processes"][0]["state"] == "checkpointed":
        assert what == "suspend", "only that leaves it so"
        work.must("resume", job.pid)
    Work.check(work)


def free_mib() -> int:
    return min(gpu.memory_free_bytes for gpu in list_gpus()) >> 20


def test_when_gpucr_gives_up_its_guard_waits_for_room(full: Start, tmp_path: Path) -> None:
    job = full(38)
    code = IN_BETWEEN.format(stranger=STRANGER, owner="Order", name="make_way", before=False, seconds=2)
    work = Work(job, tmp_path, code + "order.ROOM_LIMIT_S = 0.1\n")
    done = work.gpucr("dump", job.pid, "--to", tmp_path / "left", "--leave-running")
    assert done.returncode == 1, done.stderr
    assert "was filled by others meanwhile" in done.stderr
    work.check()


def test_memory_that_stays_at_a_checkpoint_needs_no_room(
    full: Start, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCL's contexts stay there, in NVML's figures of the process: its return needs less than it held."""
    job = full(FILLS[0.6])
    stays_bytes = 20 << 20

    def with_more() -> tuple[GpuUse, ...]:
        return (*gpus.gpu_processes(), GpuUse(job.pid, gpus.list_gpus()[0].uuid, stays_bytes))

    def with_less_free() -> tuple[Gpu, ...]:
        return tuple(replace(gpu, memory_free_bytes=gpu.memory_free_bytes - stays_bytes) for gpu in gpus.list_gpus())

    gpucr.suspend(job.pid)  # which loads all modules
    gpucr.resume(job.pid)
    for module in [each for name, each in sys.modules.items() if name.startswith("gpucr.") and each is not gpus]:
        for name, function in (("gpu_processes", with_more), ("list_gpus", with_less_free)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
    for way in ("driver", "auto"):
        gpucr.suspend(job.pid, gpu_state=way)
        gpucr.resume(job.pid)
        assert driver.state(job.pid) is CudaState.RUNNING
        assert job.send("verify") == "ok"


def test_waiting_for_room_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "lacking", dict)
    told: list[str] = []
    with pytest.raises(GpuFull, match=r"1\.0 GiB are missing for the job's return") as caught:
        room.wait_for_room({"GPU-0": 1 << 30}, 0.01, told.append)
    assert caught.value.code == "GPUCR-GPU-FULL"
    assert len(told) == 1


FAULTS = [f"{call}#{number}=2" for call in ("create", "export", "import", "map", "access") for number in range(1, 7)]


@pytest.mark.parametrize("fault", sample(FAULTS, 4))
def test_any_call_of_the_job_may_run_out_of_memory(fault: str, full: Start, tmp_path: Path) -> None:
    """Counted from the job's start: its own allocation is the first of some."""
    if fault in ("create#1=2", "map#1=2", "access#1=2"):
        pytest.skip("the program itself ends on it")
    job = full(FILLS[0.98], faults=fault)
    work = Work(job, tmp_path)
    for words in (
        ("dump", job.pid, "--to", tmp_path / "a", "--leave-running"),
        ("suspend", job.pid),
        ("resume", job.pid),
        ("dump", job.pid, "--to", tmp_path / "b", "--leave-running"),
        ("suspend", job.pid),
        ("resume", job.pid),
    ):
        done = work.gpucr(*words)
        assert done.returncode in (0, 1), (words, done.stderr)
    if command.run_json("state", job.pid)["processes"][0]["state"] != "running":
        work.must("resume", job.pid)
    work.check()
