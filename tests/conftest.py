"""Which machine the tests run on, what it lacks, and the CUDA program that they act on.

``GPUCR_TEST_PLATFORM`` is ``sim`` or ``gpu``; without it, a usable NVIDIA driver decides. On ``sim`` the simulator is
put in place before the first test.
``GPUCR_REQUIRE=gpu,criu,root,iptables,runtimes,podman,containerd,prometheus,slurm,htcondor,ray,torch,mpi,machines``
turns the skips for these into failures.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucr.criu.install import CriuInstall, find_criu
from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver, load_driver
from gpucr.errors import CriuUnavailable, DriverUnavailable
from gpucr.helper.access import socket_path
from gpucr.linux import mount_root
from gpucr.sim import build as simulator
from tests import counting, storm, turns
from tests.counter import Counter, CounterFactory
from tests.counting import Counting, StartCounting, Variant
from tests.ordinary_user import CannotHaveUsers, Machine, OrdinaryUser, machine_with_helper
from tests.ranks import Ranks, RanksFactory
from tests.sandboxed import end_all_in
from tests.stepping import Job, SandboxedJob, StartJob

MakeMachine = Callable[..., list[str]]

FIXED_COST_MS = 5
_PLATFORM = pytest.StashKey[str]()
_STATE_DIR = pytest.StashKey[Path]()


# --- the platform ----------------------------------------------------------------------------------------------


def _choose_platform() -> str:
    chosen = os.environ.get("GPUCR_TEST_PLATFORM")
    if chosen is None:
        return "gpu" if _has_real_driver() else "sim"
    if chosen not in ("sim", "gpu"):
        raise pytest.UsageError(f"GPUCR_TEST_PLATFORM={chosen} is neither sim nor gpu")
    return chosen


def _has_real_driver() -> bool:
    if not Path("/dev/nvidiactl").exists():  # a simulator in LD_LIBRARY_PATH has no device nodes
        return False
    try:
        load_driver()
        return bool(gpus.list_gpus())
    except DriverUnavailable:
        return False


def _put_simulator_in_place(state_dir: Path) -> None:
    folder = simulator.build()
    os.environ.update(simulator.environment(state_dir=state_dir, fixed_cost_ms=FIXED_COST_MS))
    # The loader reads LD_LIBRARY_PATH once, at the start of a process: for this one the libraries are loaded here,
    # and glibc answers every later dlopen of the same SONAME with them.
    for soname in ("libcuda.so.1", "libnvidia-ml.so.1"):
        ctypes.CDLL(str(folder / soname), mode=ctypes.RTLD_GLOBAL)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: none of that is garbage
    # gpucr is started very often, and takes three times as long where its modules have to be compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # In the background of a shell script, and under nohup, they are ignored, and would be by all that the tests start.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    config.stash[_PLATFORM] = _choose_platform()
    if config.stash[_PLATFORM] == "sim":
        config.stash[_STATE_DIR] = Path(tempfile.mkdtemp(prefix="gpucr-test-sim-"))
        _put_simulator_in_place(config.stash[_STATE_DIR])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns.leave_out(config, items)
    storm.allow_time(items)


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of tests are not looked at again and again for garbage, nor copied if a test forks
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    state_dir = config.stash.get(_STATE_DIR, None)
    if state_dir is not None:
        shutil.rmtree(state_dir, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    now = turns.turn()
    part = f", tests that take long: turn {now[0] + 1} of {now[1]}" if now else ""
    return f"gpucr test platform: {config.stash[_PLATFORM]}{part}"


# --- what the machine lacks ------------------------------------------------------------------------------------


def skip_or_fail(need: str, reason: str) -> None:
    """Skip the test; fail it where ``GPUCR_REQUIRE`` names the need: one of those above."""
    if need in os.environ.get("GPUCR_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and GPUCR_REQUIRE asks for {need}")
    pytest.skip(reason)


def require_devices(code: str) -> None:
    """Skip the test where a device that the code names is missing, as in many containers."""
    for path in re.findall(r"/dev/[\w/-]+", code):
        if not os.path.exists(path):
            skip_or_fail("root", f"there is no {path} here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the output of a failed command, whose exception contains only the command."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, subprocess.CalledProcessError):
        for stream in ("stdout", "stderr"):
            if printed := getattr(error, stream):
                text = printed if isinstance(printed, str) else printed.decode(errors="replace")
                report.sections.append((f"{stream} of the command", text))
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and item.config.stash[_PLATFORM] != "gpu":
        skip_or_fail("gpu", "needs a GPU with NVIDIA driver 570 or newer")
    needs_criu = item.get_closest_marker("criu")
    if (needs_criu or item.get_closest_marker("root")) and os.geteuid() != 0:
        if item.get_closest_marker("by_user") and socket_path() is not None:
            return  # CRIU is root's, behind that socket
        skip_or_fail("root", "needs root")
    if needs_criu:
        try:
            find_criu()
        except CriuUnavailable as e:
            skip_or_fail("criu", f"no CRIU: {e}")
        if not mount_root.is_mounted():
            skip_or_fail("criu", "CRIU needs a root folder that is a mount: mount --rbind TREE TREE before the chroot")


@pytest.fixture(scope="session")
def platform(pytestconfig: pytest.Config) -> str:
    """``sim`` or ``gpu``."""
    return pytestconfig.stash[_PLATFORM]


@pytest.fixture(scope="session")
def helper_machine(platform: str) -> Iterator[Machine]:
    """A machine with root's helper, and a user without privileges; one for each process of pytest's."""
    if platform != "sim":
        pytest.skip("tests/hardware/ordinary_user.py is for real GPUs")
    try:
        with machine_with_helper() as machine:
            yield machine
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")


@pytest.fixture
def user(helper_machine: Machine) -> Iterator[OrdinaryUser]:
    """A user without privileges, on a machine with root's helper, without leftovers from another test."""
    yield helper_machine.user
    home = helper_machine.user.home
    helper_machine.user.end_all()
    for path in (home / ".local/state/gpucr", *home.glob("snap*"), *home.glob("store*"), home / "images"):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def sim_only(platform: str) -> None:
    """For tests that need what only the simulator offers: injected faults, chosen GPUs."""
    if platform != "sim":
        pytest.skip("only the simulator can do this")


@pytest.fixture(scope="session")
def criu_install() -> CriuInstall:
    """A working CRIU; a visible skip if there is none."""
    try:
        return find_criu()
    except CriuUnavailable as e:
        skip_or_fail("criu", f"no CRIU: {e}")
        raise


@pytest.fixture
def sim_environment(sim_only: None, pytestconfig: pytest.Config) -> Callable[..., dict[str, str]]:
    """`gpucr.sim.build.environment` with this session's state folder; GPUs, driver and faults can be chosen."""

    def environment(gpus: str = "2x16GiB", **options: Any) -> dict[str, str]:
        return simulator.environment(
            gpus, **{"state_dir": pytestconfig.stash[_STATE_DIR], "fixed_cost_ms": FIXED_COST_MS, **options}
        )

    return environment


@pytest.fixture
def machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> MakeMachine:
    """Switch to a simulated machine with these GPUs; returns their UUIDs.

    It outlasts the test: CUDA that was started in this process meanwhile stays on it.
    """

    folder = tmp_path_factory.mktemp("machines")

    def be_on(gpu_models: str, name: str = "local") -> list[str]:
        variables = simulator.environment(gpu_models, state_dir=folder / f"gpus-of-{name}", machine=name)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        return [gpu.uuid for gpu in gpus.list_gpus()]

    return be_on


# --- what tests act with and on --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def driver() -> CudaDriver:
    """The driver of the platform."""
    return load_driver()


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own $XDG_STATE_HOME, not created yet: its registry of jobs, logs and probe results."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def process_without_cuda() -> Iterator[int]:
    """The pid of a live process that never touches CUDA."""
    null = subprocess.DEVNULL
    with subprocess.Popen(["sleep", "1000"], stdin=null, stdout=null, stderr=null, start_new_session=True) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CounterFactory]:
    """Start counter programs: ``counter("--mib", "8", env=...)``. They are killed at the end of the test."""
    started: list[Counter] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> Counter:
        program = Counter(tmp_path_factory.mktemp("counter"), arguments, env)
        started.append(program)
        program.wait_ready()
        return program

    yield start
    for program in started:
        program.close()


@pytest.fixture
def ranks(sim_only: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksFactory]:
    """Start jobs of ranks that wait for each other: ``ranks(8, "--queue", "1")``. They are killed at the end."""
    started: list[Ranks] = []

    def start(count: int, *arguments: str, env: dict[str, str] | None = None) -> Ranks:
        job = Ranks(tmp_path_factory.mktemp("ranks"), count, arguments, env)
        started.append(job)
        job.wait_ready()
        return job

    yield start
    for job in started:
        job.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The working folder of a test's jobs, whose processes end with the test."""
    made = tmp_path / "job"
    made.mkdir()
    yield made
    end_all_in(made)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    """Start programs of `tests.stepping`; they are killed at the end of the test."""
    with _jobs(Job, tmp_path / "job") as start_job:
        yield start_job


@pytest.fixture
def start_sandboxed(tmp_path: Path) -> Iterator[StartJob]:
    """The same in namespaces of their own."""
    with _jobs(SandboxedJob, tmp_path / "sandboxed") as start_job:
        yield start_job


@contextlib.contextmanager
def _jobs(kind: type[Job], folder: Path) -> Iterator[StartJob]:
    jobs: list[Job] = []

    def start_job(code: str) -> Job:
        jobs.append(kind(folder.with_name(f"{folder.name}-{len(jobs)}"), code))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


@pytest.fixture(scope="session")
def counting_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program with counting threads."""
    return counting.build(tmp_path_factory.mktemp("counting"))


@pytest.fixture
def start_counting(counting_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCounting]:
    """Start programs with counting threads; they are ended with the test."""
    with contextlib.ExitStack() as started:

        def start_one(variant: Variant = "") -> Counting:
            return started.enter_context(counting.running(counting_program, tmp_path_factory.mktemp("run"), variant))

        yield start_one


@pytest.fixture
def target(start_counting: StartCounting) -> Counting:
    """One running program with counting threads."""
    return start_counting()
