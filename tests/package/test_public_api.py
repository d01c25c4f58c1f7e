"""The public API: exactly these names, each loaded on its first use and not before."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.version import __version__

_NAMES = """
AddressMap BorrowPhase BorrowPlan Borrowed Borrower BrokenInstall Busy CanaryOutcome CanaryResult Cancellation
ChangeReport Compress Contact CopiedSnapshot CriuError CriuUnavailable CudaStarted CudaState DeadlineExceeded Difference
DoctorReport DriverError DriverUnavailable DumpCounts DumpReport EnvironmentChange Event FilesMode Finding FrozenJob
GangLock Gpu GpuFull GpuJob GpuMap GpuState GpucrError IllegalState InterposerError Interrupted InvalidRequest
JobChanged JobDamaged JobOutcome JobOutlook JobRecord JobSelector JobSnapshot JobState LaterSpace LaunchPlan Lent
LentJob ListedJob Listing LockTimeout Manifest MeasuredMachine MemoryKind MemoryUse Network NodeFailed NotACudaProcess
NotPermitted NotSupportedByDriver OnDemand OnDemandCounts OnDemandJob OnDemandPlan OnEvent OnProgress OpenDescriptor
PartReport Persist Phase Place Plan ProbeReport Process ProcessContents ProcessId ProcessInfo ProcessNotFound
ProcessRecord ProcessState Progress PruneReport PruneRules Range RehearsalFailed RehearsalReport Rendezvous Repair
RepairName RestoreReport Runtime Secret SetPart Severity SharedMemory SidecarStarted SimulatorUnavailable Snapshot
SnapshotContents SnapshotDamaged SnapshotError SnapshotExists SnapshotInStore SnapshotUnfinished  StartedJob
StateChange StateWord Store StoreDamaged StoreError StoreKey StoredLaunch StoredSet StoredSnapshot SupervisedStart
Supervision TcpMode Unsupported VerifyReport Wish WrongKey __version__ after_restore before_freeze borrow_gpus
copy_snapshots diff_snapshots doctor dump dump_part end_forwarders end_supervisors find_container forget_job freeze
init_store inspect job_states last_probe list_borrowed list_cuda_processes list_gpu_jobs list_jobs list_on_demand
list_snapshots move open_snapshot plan_borrow plan_dump plan_freeze plan_job plan_move plan_on_demand plan_restore
plan_resume plan_suspend probe prune_store recover_borrowed rehearse remove_snapshot restore restore_part resume
resume_jobs run_job run_supervised secret_of_store serve_on_demand start_missing_forwarders start_missing_supervisors
stop_job store_keys subscribe supervise_job suspend suspend_jobs verify_snapshots wait_job
"""
NAMES = _NAMES.split()


def test_all_is_exactly_this() -> None:
    assert gpucr.__all__ == NAMES, "a change of the public API is a decision: change the list here as well"
    assert dir(gpucr) == sorted(NAMES)


def test_every_name_has_one_home() -> None:
    homed = [name for names in gpucr._HOMES.values() for name in names]
    assert len(homed) == len(set(homed))
    assert set(homed) | {"__version__"} == set(gpucr.__all__)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "__version__"])
def test_every_name_resolves_to_its_homes_object(name: str) -> None:
    home = importlib.import_module(gpucr._HOME_OF[name])
    found = getattr(gpucr, name)
    assert found is getattr(home, name)
    if isinstance(found, type) or inspect.isfunction(found):  # not what is only a name for Literal[...] and the like
        assert found.__module__ == gpucr._HOME_OF[name], "its home only passes it on"
        assert inspect.getdoc(found)


def test_type_checkers_see_the_same_names() -> None:
    """They read the imports under ``if TYPE_CHECKING``, which never run."""
    module = ast.parse(Path(gpucr.__file__).read_text())
    (guarded,) = [node for node in module.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert seen == gpucr._HOME_OF


def test_lazy_names_of_preflight_are_its_own() -> None:
    from gpucr import gang
    from gpucr.diagnosis import preflight

    for module in (preflight, gang):
        for name in module.__all__:
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            getattr(module, "nothing")  # noqa: B009


def test_star_import() -> None:
    scope: dict[str, object] = {}
    exec("from gpucr import *", scope)  # noqa: S102 - what is tested
    assert set(NAMES) <= set(scope)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'gpucr' has no attribute 'suspned'"):
        gpucr.suspned  # noqa: B018


def test_the_version() -> None:
    assert gpucr.__version__ == __version__
    assert [part.isdigit() for part in __version__.split(".")[:2]] == [True, True]


def test_import_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import gpucr; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"__future__", "gpucr", "gpucr.version"}


_CRIU = ("gpucr.criu.install", "gpucr.criu.engine", "gpucr.criu.service", "gpucr.criu.images")
"""All but CRIU's options, which a manifest holds."""

_FOR_CUDA = (
    *("gpucr.gang.actions", "gpucr.gang.threads", "gpucr.gpu_state.cuda_work", "gpucr.gpu_state.kinds"),
    *("gpucr.gpu_state.steps", "gpucr.gpu_state.recovery", "gpucr.gpu_state.staging", "gpucr.gpu_state.interposed"),
    *("gpucr.gpu_state.custom_storage", "gpucr.gpu_state.returns", "gpucr.interposer.client"),
    *("gpucr.interposer.protocol", "gpucr.interposer.vault", "gpucr.linux.ptrace", "gpucr.linux.injection"),
    *("gpucr.diagnosis.preflight.traits", "gpucr.diagnosis.preflight.traps", "gpucr.diagnosis.preflight.modes"),
    *("concurrent.futures", "logging", "queue"),
)
"""What one tree without CUDA is dumped and restored without, by root."""


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("from gpucr import suspend", ("click", "rich", "google", "pynvml", "psutil", *_CRIU, "gpucr.cli")),
        ("from gpucr import Snapshot", ("click", "rich", "google", "pynvml", *_CRIU, "gpucr.operations", "subprocess")),
        ("from gpucr import inspect", ("click", "rich", "pynvml", "gpucr.cli", "gpucr.driver", "gpucr.criu.engine")),
        ("from gpucr import Process", ("click", "rich", "google", "pynvml", "gpucr.criu", "gpucr.operations")),
        ("from gpucr import GpucrError", ("dataclasses", "click", "gpucr.driver", "gpucr.operations")),
        (
            "import gpucr.jobs.sandbox.keeper",
            ("subprocess", "dataclasses", "gpucr.jobs.sandbox.spawn", "gpucr.jobs.sandbox.lookup", "gpucr.model"),
        ),
        (
            "import gpucr.cli.dump, gpucr.cli.restore",
            (
                *_FOR_CUDA,
                *(
                    "gpucr.containers.by_runtime",
                    "gpucr.containers.podman",
                    "gpucr.store.opened",
                    "gpucr.store.location",
                    "gpucr.diagnosis.probe",
                ),
                *("gpucr.helper.client", "gpucr.privileged.keys"),
                *(
                    "rich",
                    "pynvml",
                    "psutil",
                    "cryptography",
                    "numpy",
                    "blake3",
                    "zstandard",
                    "obstore",
                    "multiprocessing",
                ),
                *(
                    "asyncio",
                    "concurrent.futures.process",
                    "difflib",
                    "email",
                    "http",
                    "secrets",
                    "ssl",
                    "urllib.request",
                ),
            ),
        ),
    ],
)
def test_an_import_loads_only_what_it_needs(statement: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(heavy) & set(done.stdout.split())


@pytest.mark.criu
def test_a_dump_without_cuda_loads_no_cuda_modules(tmp_path: Path) -> None:
    """Not only when a command begins: nothing on its way loads it either."""
    with (tmp_path / "output").open("wb") as output:
        # CRIU dumps no process whose session began outside its pid namespace, as this test's may have.
        job = subprocess.Popen(
            ["sleep", "1000"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    try:
        for statement in (f"gpucr.dump({job.pid}, 's')", "gpucr.restore('s')"):
            code = f"import gpucr, sys; {statement}; print(*sys.modules)"
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
            )
            if job.returncode is None:
                job.wait(10)  # reaped, or the restore could not have its pid
            assert not {*_FOR_CUDA, "gpucr.helper.client"} & set(done.stdout.split())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGKILL)  # the restored one too, which is not this process's child
        job.wait(10)


_NO_NAMES_OF_OURS = frozenset(
    (
        *("None", "Any", "BaseException", "Callable", "Iterable", "Iterator", "Literal", "Mapping", "Path", "Self"),
        "PathLike",
        "Report",  # DumpReport or RestoreReport
        "Sequence",
        *("bool", "bytes", "dict", "float", "frozenset", "int", "list", "object", "os", "str", "tuple", "type"),
        "preflight",
        *(
            "Count",
            "CuResult",
            "Moment",
            "Priority",
            "Seconds",
            "Text",
        ),  # int, float and str, within the limits of a record
    )
)
_OF_FORMATS = ("Manifest", "ProcessRecord", "Store", "StoredSnapshot", "Snapshot", "Listing")
"""Their members follow the formats (docs/reference), and have types of their own."""


def _annotations() -> Iterator[tuple[str, str]]:
    """Where, and what, of all parameters, results and members that users see."""
    for name in NAMES:
        found = getattr(gpucr, name)
        if inspect.isfunction(found):
            yield from ((f"{name}: {each}", str(text)) for each, text in found.__annotations__.items())
        if not isinstance(found, type) or name in _OF_FORMATS:
            continue
        yield from ((f"{name}.{each}", str(text)) for each, text in vars(found).get("__annotations__", {}).items())
        for member, value in vars(found).items():
            call = value.fget if isinstance(value, property) else value
            if not member.startswith("_") and inspect.isfunction(call):
                yield from ((f"{name}.{member}: {each}", str(text)) for each, text in call.__annotations__.items())


def test_types_in_public_signatures_can_be_imported() -> None:
    walked = list(_annotations())
    assert len(walked) > 250
    missing = {
        f"{where}: {text}"
        for where, text in walked
        for name in re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'|\"[^\"]*\"", "", text))
        if name not in _NO_NAMES_OF_OURS and name not in NAMES
    }
    assert missing == set()
