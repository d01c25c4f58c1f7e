"""CRIU, privileges, kernel, memory, disk, containers: each condition made real, or injected if it is read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpucr.checkups import engine, kernel, memory, privileges, runtimes, storage
from gpucr.checkups.engine import CriuFacts
from gpucr.checkups.kernel import KernelFacts
from gpucr.checkups.memory import MemoryFacts
from gpucr.checkups.privileges import PrivilegeFacts
from gpucr.checkups.runtimes import RuntimeFacts
from gpucr.checkups.storage import StorageFacts
from gpucr.containers import criu_config
from gpucr.containers.criu_config import HookStatus
from gpucr.criu import install as criu_install_module
from gpucr.criu.install import CriuInstall
from gpucr.errors import CriuError, NotPermitted
from gpucr.linux import capabilities, sock_diag, tracing
from gpucr.linux.capabilities import Capabilities
from gpucr.linux.cgroups import MemoryLimit
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import Gpu
from tests.checkups.judging import only, severities
from tests.children import NOBODY_UID
from tests.snapshot import samples

GIB = 1 << 30


# --- CRIU -------------------------------------------------------------------------------------------------------

INSTALL = CriuInstall(("/usr/sbin/criu",), (4, 2, 1), "path", Path("/usr/sbin/criu"))
CRIU = CriuFacts(INSTALL, (4, 2, 0), is_privileged=True)


def test_a_working_criu() -> None:
    assert severities(engine.check(CRIU)) == ["ok"]


@pytest.mark.parametrize(
    ("is_privileged", "severity", "repair", "remedy"),
    [
        (True, "blocking", "fetch-criu", "CRIU 4.2 or newer"),
        (False, "warning", None, "sudo gpucr helper install"),  # what a user fetches, only root can start
    ],
)
def test_no_criu(is_privileged: bool, severity: str, repair: str | None, remedy: str) -> None:
    facts = CriuFacts(None, (4, 2, 0), is_privileged, "there is no `criu` on PATH")
    one = only(engine.check(facts))
    assert (one.severity, one.repair, one.code) == (severity, repair, "GPUCR-NO-CRIU")
    assert remedy in one.remedy


def test_a_chroot_into_a_plain_folder() -> None:
    _, one = engine.check(replace(CRIU, has_mounted_root=False))
    assert (one.severity, one.about) == ("warning", "CRIU")
    assert "mount --rbind TREE TREE" in one.remedy


def test_a_criu_that_does_not_work_here() -> None:
    failure = CriuError(
        "CRIU 4.2.1 cannot work here: no", phase="check", reason="Kernel lacks it", hint="another kernel"
    )
    one = only(engine.check(replace(CRIU, failure=failure)))
    assert (one.severity, one.remedy) == ("blocking", "another kernel")
    assert "Kernel lacks it" in one.evidence


def test_a_criu_too_old_for_the_kernel() -> None:
    """Only a CRIU named by GPUCR_CRIU gets this far."""
    one = only(engine.check(replace(CRIU, install=replace(INSTALL, version=(4, 1, 1)))))
    assert (one.severity, one.what) == ("warning", "CRIU 4.1.1 is too old for this kernel")


def test_without_privileges_criu_cannot_be_checked() -> None:
    assert severities(engine.check(replace(CRIU, is_privileged=False))) == ["unknown"]


def test_the_helpers_criu_counts() -> None:
    install = replace(INSTALL, origin="helper", path=Path("/run/gpucr-helper/socket"))
    found = engine.check(replace(CRIU, install=install, is_privileged=False))
    assert severities(found) == ["ok"]
    assert "root's helper has CRIU 4.2.1" in found[0].what


def test_checking_without_criu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(criu_install_module.ENVIRONMENT_VARIABLE, raising=False)
    facts = engine.look()
    assert facts.install is None
    assert "none has been fetched" in facts.missing


@pytest.mark.criu
def test_checking_a_real_criu(criu_install: CriuInstall) -> None:
    facts = engine.look()
    assert facts.install == criu_install
    assert facts.is_privileged == capabilities.can_checkpoint_processes()


# --- privileges -------------------------------------------------------------------------------------------------

ALL = (1 << 41) - 1
ROOT = Capabilities(ALL, ALL, 0, ALL, 0, is_root=True, no_new_privs=False)
USER = Capabilities(0, 0, 0, ALL, 0, is_root=False, no_new_privs=False)
PRIVILEGES = PrivilegeFacts(ROOT, ptrace_scope=1, seccomp=0, in_user_namespace=False)


def without(*numbers: int) -> Capabilities:
    return replace(ROOT, effective=ALL & ~sum(1 << number for number in numbers))


def test_root() -> None:
    assert severities(privileges.check(PRIVILEGES)) == ["ok"] * 3


@pytest.mark.parametrize(
    ("number", "severity", "what"),
    [
        (21, "blocking", "this is root, without the capabilities that CRIU needs"),
        (19, "blocking", "this is root, without the capabilities that CRIU needs"),
        (25, "blocking", "CAP_SYS_TIME is missing"),
        (24, "warning", "CAP_SYS_RESOURCE is missing"),
        (12, "warning", "CAP_NET_ADMIN is missing"),
        (13, "warning", "CAP_NET_RAW is missing"),
    ],
)
def test_root_in_a_container(number: int, severity: str, what: str) -> None:
    one = only(privileges.check(replace(PRIVILEGES, own=without(number), ptrace_scope=0)))
    assert (one.severity, one.what) == (severity, what)


def test_a_user() -> None:
    found = privileges.check(replace(PRIVILEGES, own=USER, ptrace_scope=0))
    assert (only(found).severity, "sudo gpucr helper install" in only(found).remedy) == ("warning", True)


def test_a_user_with_the_helper() -> None:
    found = privileges.check(replace(PRIVILEGES, own=USER, ptrace_scope=0, helper=Path("/run/gpucr-helper/socket")))
    assert severities(found) == ["ok"] * 3
    assert "/run/gpucr-helper/socket" in found[0].evidence


@pytest.mark.parametrize(
    ("own", "scope", "severity"),
    [
        (ROOT, None, "ok"),
        (ROOT, 0, "ok"),
        (ROOT, 2, "ok"),
        (ROOT, 3, "blocking"),
        (USER, 0, "ok"),
        (USER, 1, "warning"),
        (USER, 2, "warning"),
        (USER, 3, "blocking"),
    ],
)
def test_ptrace_scope(own: Capabilities, scope: int | None, severity: str) -> None:
    found = privileges.check(replace(PRIVILEGES, own=own, ptrace_scope=scope))
    (one,) = [each for each in found if each.about == "ptrace"]
    assert one.severity == severity
    assert one.repair is None, "it would lower the machine's security"


@pytest.mark.parametrize("helper", [None, Path("/run/gpucr-helper/socket")])
@pytest.mark.parametrize("own", [ROOT, USER])
def test_no_executable_memory(own: Capabilities, helper: Path | None) -> None:
    """The helper's CRIU is in a security context of its own."""
    facts = replace(PRIVILEGES, own=own, ptrace_scope=0, has_executable_memory=False, helper=helper)
    found = [each.severity for each in privileges.check(facts) if "executable" in each.what]
    assert found == ([] if own is USER and helper is not None else ["blocking"])


@pytest.mark.parametrize("mode", [1, 2, None])
def test_system_call_filters(mode: int | None) -> None:
    one = only(privileges.check(replace(PRIVILEGES, seccomp=mode)))
    assert (one.about, one.severity, one.repair) == ("seccomp", "warning", None)


def test_a_user_namespace() -> None:
    assert only(privileges.check(replace(PRIVILEGES, in_user_namespace=True))).severity == "warning"


def _seen(first: str, *wrapper: str) -> str:
    """What `privileges.look` sees in a separate process that runs ``first``."""
    program = f"import ctypes, os\nfrom gpucr.checkups import privileges\n{first}\nprint(privileges.look())"
    arguments = [*wrapper, sys.executable, "-c", program]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.root
def test_checking_as_nobody() -> None:
    assert "effective=0," in _seen(f"os.setuid({NOBODY_UID})")


@pytest.mark.root
def test_checking_from_a_user_namespace() -> None:
    assert "in_user_namespace=True" in _seen("os_error = ctypes.CDLL(None).unshare(0x10000000); assert os_error == 0")


@pytest.mark.root
def test_checking_under_a_filter() -> None:
    assert "seccomp=2" in _seen("from gpucr.linux import seccomp; seccomp.refuse_io_uring()")


def test_checking_yama(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracing, "PTRACE_SCOPE", tmp_path / "scope")
    assert privileges.look().ptrace_scope is None
    (tmp_path / "scope").write_text("2\n")
    assert privileges.look().ptrace_scope == 2


# --- the kernel -------------------------------------------------------------------------------------------------

KERNEL = KernelFacts("6.18", "x86_64", samples.PROCESSOR, True, True, ("pid", "mnt", "net", "ipc", "time"), ())


def test_a_kernel_with_every_feature() -> None:
    assert severities(kernel.check(KERNEL)) == ["ok"] * 3


@pytest.mark.parametrize(
    ("change", "severity", "says"),
    [
        ({"architecture": "aarch64"}, "warning", "aarch64"),
        ({"can_choose_pids": False}, "blocking", "CONFIG_CHECKPOINT_RESTORE"),
        ({"lists_sockets": False}, "warning", "TCP sockets"),
        ({"kinds": ("pid", "mnt", "net", "time")}, "warning", "no new ipc namespaces"),
        ({"forbidden": ("pid",)}, "warning", "no new pid namespaces"),
        ({"kinds": ("pid", "mnt", "net", "ipc")}, "warning", "time namespaces"),
        ({"forbidden": ("time",)}, "warning", "time namespaces"),
    ],
)
def test_a_kernel_that_lacks_a_feature(change: dict[str, Any], severity: str, says: str) -> None:
    one = only(kernel.check(replace(KERNEL, **change)))
    assert one.severity == severity
    assert says in one.what


def test_checking_the_real_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> tuple[()]:
        raise OSError(errno.ENOENT, "no such protocol")

    (tmp_path / "max_net_namespaces").write_text("0\n")
    monkeypatch.setattr(kernel, "_LIMITS", tmp_path)
    monkeypatch.setattr(kernel, "_LAST_PID", tmp_path / "ns_last_pid")
    monkeypatch.setattr(sock_diag, "tcp_sockets", refuse)
    facts = kernel.look()
    assert (facts.forbidden, facts.can_choose_pids, facts.lists_sockets) == (("net",), False, False)


# --- memory -----------------------------------------------------------------------------------------------------

MEMORY = MemoryFacts(True, None, "never", "madvise", 64 * GIB, 50 * GIB, 0, 140 * GIB, 40 * GIB, "v2", ())


def test_a_machine_with_huge_pages_and_room() -> None:
    assert severities(memory.check(MEMORY)) == ["ok"] * 4


def test_huge_pages_that_are_denied() -> None:
    one = only(memory.check(replace(MEMORY, why_small="forbidden", shared_policy="deny")))
    assert (one.severity, one.repair) == ("warning", "huge-pages-shared")


def test_no_private_tmpfs() -> None:
    one = only(memory.check(replace(MEMORY, why_small="no tmpfs with huge pages can be made")))
    assert (one.severity, one.repair) == ("warning", None)


def test_a_user_cannot_tell_what_root_would_get() -> None:
    assert only(memory.check(replace(MEMORY, why_small="not permitted", is_privileged=False))).severity == "unknown"


@pytest.mark.parametrize(("policy", "repair"), [("never", "huge-pages-private"), (None, None)])
def test_no_huge_pages_in_private_memory(policy: str | None, repair: str | None) -> None:
    one = only(memory.check(replace(MEMORY, private_policy=policy)))
    assert (one.severity, one.repair) == ("warning", repair)


def test_reserved_memory() -> None:
    assert only(memory.check(replace(MEMORY, reserved_bytes=32 * GIB))).what.startswith("32.0 GiB of host memory")


def test_less_host_memory_than_device_memory_in_use() -> None:
    one = only(memory.check(replace(MEMORY, available_bytes=20 * GIB)))
    assert (one.about, one.severity) == ("host memory", "warning")


@pytest.mark.parametrize("is_hard", [True, False])
def test_a_cgroup_with_too_little(is_hard: bool) -> None:
    limit = MemoryLimit(Path("/sys/fs/cgroup/a/memory.max"), 30 * GIB, 10 * GIB, is_hard)
    roomy = replace(limit, available_bytes=45 * GIB)
    one = only(memory.check(replace(MEMORY, limits=(limit, roomy))))
    assert (one.about, one.severity) == ("cgroups", "warning")
    assert str(limit.path) in one.evidence
    assert ("kill" in one.consequence) is is_hard


def test_checking_real_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = tmp_path / "shmem_enabled"
    policy.write_text("always within_size advise never [deny] force\n")
    monkeypatch.setattr(memory, "SHARED_POLICY", policy)
    monkeypatch.setattr(memory, "PRIVATE_POLICY", tmp_path / "enabled")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1024 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    facts = memory.look([Gpu(0, "GPU-x", "GPU", 4 * GIB, GIB)])
    assert (facts.shared_policy, facts.private_policy) == ("deny", None)
    assert (facts.total_bytes, facts.reserved_bytes) == (1 << 20, 6 << 20)
    assert (facts.device_total_bytes, facts.device_used_bytes) == (4 * GIB, 3 * GIB)


def test_a_staging_file_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_size_bytes: int) -> StagingFile:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(StagingFile, "create", refuse)
    assert memory.look([]).why_small == "none can be made: Too many open files"


@pytest.mark.parametrize(
    ("kinds", "expected"), [(["cgroup"], "v1"), (["cgroup2"], "v2"), (["cgroup", "cgroup2"], "hybrid"), ([], "none")]
)
def test_which_cgroups_are_mounted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kinds: list[str], expected: str
) -> None:
    mounts = tmp_path / "mountinfo"
    lines = [f"{n} 1 0:{n} / /sys/{kind} rw shared:{n} - {kind} {kind} rw" for n, kind in enumerate(["tmpfs", *kinds])]
    mounts.write_text("\n".join(lines))
    monkeypatch.setattr(memory, "_MOUNTS", mounts)
    assert memory.hierarchy() == expected


# --- the disk ---------------------------------------------------------------------------------------------------

STORAGE = StorageFacts(Path("/snapshots"), None, 100 * GIB, False, True, 40 * GIB, was_named=True)


def test_a_disk_with_room() -> None:
    assert severities(storage.check(STORAGE)) == ["ok", "ok"]


@pytest.mark.parametrize(("was_named", "severity"), [(True, "blocking"), (False, "warning")])
def test_a_folder_that_cannot_be_written(was_named: bool, severity: str) -> None:
    facts = replace(STORAGE, problem="its file system is mounted read-only", was_named=was_named)
    assert only(storage.check(facts)).severity == severity


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"free_bytes": 30 * GIB}, "30.0 GiB free"),
        ({"is_memory": True}, "is in memory"),
        ({"is_direct": False}, "page cache"),
    ],
)
def test_a_slower_disk(change: dict[str, Any], says: str) -> None:
    one = only(storage.check(replace(STORAGE, **change)))
    assert one.severity == "warning"
    assert says in one.what


def test_checking_a_real_disk(tmp_path: Path) -> None:
    facts = storage.look(tmp_path, [], was_named=True)
    assert (facts.folder, facts.problem) == (tmp_path, None)
    assert facts.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_checking_a_memory_backed_folder() -> None:
    assert storage.look(Path("/dev/shm"), [], was_named=True).is_memory


@pytest.mark.root
def test_checking_a_read_only_disk(tmp_path: Path) -> None:
    look = (
        f"from gpucr.checkups import storage; print(storage.look(Path({str(tmp_path)!r}), [], was_named=True).problem)"
    )
    code = (
        "import ctypes\nfrom pathlib import Path\nfrom gpucr.linux import namespaces\n"
        "namespaces.make_new('mnt'); namespaces.follow_host_mounts()\n"
        f"assert ctypes.CDLL(None).mount(b'none', {os.fsencode(tmp_path)!r}, b'tmpfs', 1, None) == 0\n{look}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "its file system is mounted read-only", done.stderr


@pytest.mark.root
def test_checking_another_users_folder() -> None:
    code = (
        "import os\nfrom pathlib import Path\nfrom gpucr.checkups import storage\n"
        f"os.setuid({NOBODY_UID}); print(storage.look(Path('/proc/self'), [], was_named=True).problem)\n"
        "print(storage.look(Path('/usr'), [], was_named=True).problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["this user may not write there"] * 2, done.stderr


# --- containers -------------------------------------------------------------------------------------------------

SCRIPT = Path("/etc/criu/gpucr-hook")
HOOK = HookStatus(SCRIPT, (Path("/etc/criu/runc.conf"),), is_current=True)
RUNTIMES = RuntimeFacts(("runc", "crun"), HOOK, is_hybrid=False)


def test_runtimes_whose_criu_calls_gpucr() -> None:
    assert severities(runtimes.check(RUNTIMES)) == ["ok"]


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (HookStatus(SCRIPT, (), is_current=False), "the hook is not installed"),
        (HookStatus(SCRIPT, HOOK.configured, is_current=False), "the hook is of another gpucr"),
    ],
)
def test_runtimes_without_the_hook(hook: HookStatus, says: str) -> None:
    one = only(runtimes.check(replace(RUNTIMES, hook=hook)))
    assert one.severity == "warning"
    assert says in one.what


def test_no_runtime_needs_no_hook() -> None:
    facts = RuntimeFacts((), HookStatus(SCRIPT, (), is_current=False), is_hybrid=True)
    assert severities(runtimes.check(facts)) == ["ok"]


def test_crun_on_a_hybrid_machine() -> None:
    assert "crun" in only(runtimes.check(replace(RUNTIMES, is_hybrid=True))).what
    assert severities(runtimes.check(replace(RUNTIMES, is_hybrid=True, found=("runc",)))) == ["ok"]


def test_finding_real_runtimes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("podman", "runc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtimes.look().found == ("runc", "podman")


def test_an_unreadable_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runc.conf").mkdir()
    read = criu_config.status
    monkeypatch.setattr(criu_config, "status", lambda: read(tmp_path))
    one = only(runtimes.check(replace(runtimes.look(), found=("runc",))))
    assert one.severity == "warning"
    assert f"{tmp_path}/runc.conf cannot be read: Is a directory" in one.evidence


def test_a_configuration_only_root_can_read() -> None:
    problem = NotPermitted("CRIU's configuration in /etc/criu cannot be read: Permission denied", pid=1)
    one = only(runtimes.check(replace(RUNTIMES, hook=None, problem=problem)))
    assert (one.severity, one.remedy) == ("unknown", "sudo gpucr doctor")
    assert "Permission denied" in one.evidence


# --- capabilities -----------------------------------------------------------------------------------------------


def test_capabilities_of_a_started_program() -> None:
    assert replace(ROOT, effective=0, permitted=0).after_exec() == ALL
    assert replace(ROOT, bounding=5, inheritable=2).after_exec() == 7
    assert replace(ROOT, permitted=3, no_new_privs=True).after_exec() == 3
    assert replace(USER, ambient=8).after_exec() == 8


def test_names_of_capabilities() -> None:
    assert capabilities.names_of(1 << 21 | 1 << 40 | 1 << 60) == (
        "CAP_SYS_ADMIN",
        "CAP_CHECKPOINT_RESTORE",
        "capability 60",
    )


@pytest.mark.root
def test_the_prediction_matches_the_kernel() -> None:
    """Of a bounding set without CAP_SYS_BOOT (22)."""
    code = (
        "import ctypes, subprocess, sys\nfrom gpucr.linux import capabilities\n"
        "assert ctypes.CDLL(None).prctl(24, 22, 0, 0, 0) == 0\nprint(capabilities.own().after_exec(), flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'from gpucr.linux import capabilities as c; print(c.own().permitted)'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    predicted, real = map(int, done.stdout.split())
    assert predicted == real
    assert not real >> 22 & 1
