"""gpucr.linux.cgroups: limits of real cgroups, and of trees as other machines have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.linux import cgroups, memory
from gpucr.linux.cgroups import MemoryLimit, assigned_cpus, frozen_by, memory_limits
from tests.children import python, unused_pid
from tests.memory_cgroup import ENTER, limited

MIB = 1 << 20
PID = 4711
UNLIMITED_V1 = "9223372036854771712\n"

EATER = """
import mmap, signal
m = mmap.mmap(-1, int(__import__('sys').argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for i in range(0, len(m), 4096): m[i] = 1
print('ready', flush=True); signal.pause()
"""

# --- a real one ------------------------------------------------------------------------------------------------


def test_a_real_limit_leaves_the_unused_part() -> None:
    with limited(96 * MIB) as (folder, limit_file), python(ENTER.format(folder=str(folder)) + EATER, 32 * MIB) as child:
        (limit,) = [found for found in memory_limits(child.pid) if found.path == limit_file]
        assert (limit.limit_bytes, limit.is_hard) == (96 * MIB, True)
        assert 32 * MIB < limit.available_bytes <= 64 * MIB
        assert 32 * MIB < memory.available_bytes(child.pid) <= 64 * MIB
        assert memory.available_bytes() > 64 * MIB  # the caller is in another cgroup
        assert limit_file not in [found.path for found in memory_limits()]


WRITER = """
import os
with open(sys.argv[2], 'wb') as f:
    for _ in range(32): f.write(bytes(1 << 20))
    f.flush(); os.fsync(f.fileno())
"""


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    with limited(64 * MIB) as (folder, limit_file):
        code = ENTER.format(folder=str(folder)) + "import sys\n" + WRITER + EATER
        with python(code, 4 * MIB, tmp_path / "file") as child:
            used_file = folder / ("memory.current" if limit_file.name == "memory.max" else "memory.usage_in_bytes")
            if int(used_file.read_text()) < 32 * MIB or memory.lies_in_memory(tmp_path):
                pytest.skip("the test's folder has no page cache of its own")
            (limit,) = [found for found in memory_limits(child.pid) if found.path == limit_file]
            assert 36 * MIB < limit.available_bytes < 60 * MIB


def test_an_ended_process_has_no_limits() -> None:
    assert memory_limits(unused_pid()) == ()
    assert memory.available_bytes(unused_pid()) > 0


# --- trees of other machines -----------------------------------------------------------------------------------

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make a fake /proc: ``mounts`` are (type, root, options) of hierarchies, mounted at the folders "0", "1", ..."""

    def make(cgroup: str, *mounts: tuple[str, str, str]) -> Path:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / str(PID)).mkdir()
        (tmp_path / "proc" / str(PID) / "cgroup").write_text(cgroup)
        lines = ["22 1 0:20 / /proc rw,relatime shared:5 master:3 - proc proc rw"]
        for number, (kind, root, options) in enumerate(mounts):
            (tmp_path / str(number)).mkdir()
            place = str(tmp_path / str(number)).replace(" ", "\\040")
            lines.append(f"3{number} 23 0:2{number} {root} {place} rw,nosuid shared:9 - {kind} {kind} {options}")
        (tmp_path / "proc" / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(cgroups, "PROC", tmp_path / "proc")
        return tmp_path

    return make


def cgroup(folder: Path, **files: object) -> Path:
    """A folder with files: ``memory_max=5`` is memory.max."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")
    return folder


V2 = ("cgroup2", "/", "rw,nsdelegate")
V1_MEMORY = ("cgroup", "/", "rw,memory")


def test_every_ancestors_limit_counts(machine: Machine) -> None:
    top = machine("0::/kubepods/pod1/main\n", V2) / "0"
    main = cgroup(top / "kubepods/pod1/main", memory_max="max", memory_high=70, memory_current=10)
    pod = cgroup(top / "kubepods/pod1", memory_max=100, memory_high="max", memory_current=30)
    all_pods = cgroup(top / "kubepods", memory_max=500, memory_current=450)
    assert memory_limits(PID) == (
        MemoryLimit(main / "memory.high", 70, 60, is_hard=False),
        MemoryLimit(pod / "memory.max", 100, 70, is_hard=True),
        MemoryLimit(all_pods / "memory.max", 500, 50, is_hard=True),
    )
    assert memory.available_bytes(PID) == 50


def test_reclaimable_memory_is_available(machine: Machine) -> None:
    top = machine("0::/a\n", V2) / "0"
    stat = (
        "anon 4000\nfile 3000\nshmem 600\ninactive_anon 7\nactive_file 1000\ninactive_file 1400\nslab_reclaimable 100"
    )
    cgroup(top / "a", memory_max=10_000, memory_current=8_000, memory_stat=stat)
    (limit,) = memory_limits(PID)
    assert limit.available_bytes == 10_000 - (8_000 - 1000 - 1400 - 100)


def test_usage_over_the_limit_leaves_nothing(machine: Machine) -> None:
    top = machine("0::/a\n", V2) / "0"
    cgroup(top / "a", memory_max=100, memory_current=170)
    assert [limit.available_bytes for limit in memory_limits(PID)] == [0]


def test_version_1_counts_the_cgroups_below(machine: Machine) -> None:
    top = machine("5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/job/step\n", V1_MEMORY) / "0"
    stat = "cache 1\nactive_file 1\ninactive_file 2\ntotal_active_file 30\ntotal_inactive_file 40"
    job = cgroup(top / "job", memory_limit_in_bytes=500, memory_usage_in_bytes=200, memory_stat=stat)
    cgroup(top / "job/step", memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=100)
    cgroup(top, memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=900)
    assert memory_limits(PID) == (MemoryLimit(job / "memory.limit_in_bytes", 500, 500 - 130, is_hard=True),)


def test_on_a_hybrid_machine_the_controller_is_in_one_of_two_hierarchies(machine: Machine) -> None:
    root = machine("7:memory:/a\n1:name=systemd:/s\n0::/s\n", V2, ("cgroup", "/", "rw,cpu"), V1_MEMORY)
    cgroup(root / "0" / "s", cgroup_procs="")
    limited_one = cgroup(root / "2" / "a", memory_limit_in_bytes=500, memory_usage_in_bytes=200)
    assert [limit.path.parent for limit in memory_limits(PID)] == [limited_one]


@pytest.mark.parametrize(
    ("path", "mounted_root", "below"),
    [
        ("/", "/", "."),  # a cgroup namespace of its own
        ("/docker/abc", "/docker/abc", "."),  # a container that sees its part of the hierarchy only
        ("/docker/abc/sub", "/docker/abc", "sub"),
        ("/docker/abcd", "/docker/abc", None),  # the process is in another container
        ("/../other", "/", None),  # and seen from a cgroup namespace
        ("/docker", "/docker/abc", None),
    ],
)
def test_mounts_in_a_container(machine: Machine, path: str, mounted_root: str, below: str | None) -> None:
    top = machine(f"0::{path}\n", ("cgroup2", mounted_root, "rw")) / "0"
    cgroup(top, memory_max=1000, memory_current=100)
    cgroup(top / "sub", memory_max=800, memory_current=0)
    cgroup(top.parent / "other", memory_max=1, memory_current=0)  # beside the mount: not a cgroup
    expected = {None: [], ".": [900], "sub": [800, 900]}[below]
    assert [limit.available_bytes for limit in memory_limits(PID)] == expected


def test_a_mount_point_with_a_space(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    top = machine("0::/a\n", V2) / "0"
    place = tmp_path / "two words"
    top.rename(place)
    mountinfo = tmp_path / "proc" / "self" / "mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace(str(top), str(place).replace(" ", "\\040")))
    cgroup(place / "a", memory_max=100, memory_current=40)
    assert [limit.available_bytes for limit in memory_limits(PID)] == [60]


def test_the_first_of_several_mounts_counts(machine: Machine) -> None:
    folder = machine("0::/a\n", V2, V2)
    cgroup(folder / "0" / "a", memory_max=100, memory_current=40)  # and the folder "1" has been unmounted
    assert [limit.available_bytes for limit in memory_limits(PID)] == [60]


def test_a_removed_cgroup_sets_no_limit(machine: Machine) -> None:
    top = machine("0::/gone (deleted)\n", V2) / "0"
    cgroup(top, memory_max=100, memory_current=40)
    assert [limit.available_bytes for limit in memory_limits(PID)] == [60]


def test_no_cgroups_mounted(machine: Machine) -> None:
    machine("0::/a\n4:memory:/a\n")
    assert memory_limits(PID) == ()


# --- freezers --------------------------------------------------------------------------------------------------

V1_FREEZER = ("cgroup", "/", "rw,freezer")


def test_the_nearest_frozen_cgroup_of_version_2_is_found(machine: Machine) -> None:
    top = machine("0::/pods/web/inner\n", V2) / "0"
    cgroup(top / "pods/web/inner", cgroup_freeze=0)
    cgroup(top / "pods/web", cgroup_freeze=0)
    cgroup(top / "pods", cgroup_freeze=0)
    assert frozen_by(PID) is None
    cgroup(top / "pods", cgroup_freeze=1)
    assert frozen_by(PID) == top / "pods"
    web = cgroup(top / "pods/web", cgroup_freeze=1)
    assert frozen_by(PID) == web


def test_version_1_has_a_separate_freezer_hierarchy(machine: Machine) -> None:
    top = machine("6:freezer:/web/inner\n4:memory:/else\n0::/\n", V1_MEMORY, V1_FREEZER, V2) / "1"
    cgroup(top / "web/inner", freezer_self_freezing=0)
    web = cgroup(top / "web", freezer_self_freezing=0)
    assert frozen_by(PID) is None
    cgroup(web, freezer_self_freezing=1)
    assert frozen_by(PID) == web


def test_an_ended_process_is_not_frozen() -> None:
    assert frozen_by(unused_pid()) is None


def test_cpus_come_from_the_innermost_level_that_sets_them(machine: Machine) -> None:
    top = machine("0::/slice/job/step\n", V2) / "0"
    cgroup(top / "slice", **{"cpuset_cpus.effective": "0-7"})
    cgroup(top / "slice/job", **{"cpuset_cpus.effective": "4-7"})
    cgroup(top / "slice/job/step")
    assert assigned_cpus(PID) == "4-7"


def test_cpus_of_version_1(machine: Machine) -> None:
    top = machine("3:cpuset:/job\n0::/\n", V2, ("cgroup", "/", "rw,cpuset"))
    cgroup(top / "1" / "job", cpuset_cpus="0-9", cpuset_effective_cpus="2,3")
    assert assigned_cpus(PID) == "2,3"


def test_a_cgroup_without_cpus_of_its_own(machine: Machine) -> None:
    cgroup(machine("0::/job\n", V2) / "0" / "job")
    assert assigned_cpus(PID) is None
    assert assigned_cpus(unused_pid()) is None
