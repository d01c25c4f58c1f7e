"""Jobs that use files whose name is gone while another hard link is left. With real CRIU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.criu.linked_files import save_linked_files
from gpucr.surroundings import observe
from tests.stepping import StartJob
from tests.storm import later

pytestmark = pytest.mark.criu

UPGRADED = """
import mmap, stat
os.mkdir("cache")
with open("cache/lib", "wb") as file:
    os.truncate(file.fileno(), 3 << 20)
    file.seek(1 << 20)
    file.write(b"old" * 5000)
os.chmod("cache/lib", 0o751)
os.utime("cache/lib", ns=(10**18, 10**18 + 1000))
os.link("cache/lib", "lib")
opened = open("lib", "rb")
again = open("lib", "rb")
mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
with open("new", "w") as file:
    file.write("new")
os.rename("new", "lib")
def facts():
    status = os.stat(opened.fileno())
    again.seek(1 << 20)
    return [
        mapped[1 << 20 : (1 << 20) + 15000] == b"old" * 5000 == again.read(15000),
        len(mapped), mapped[:1 << 20].count(0), stat.filemode(status.st_mode), status.st_mtime_ns,
        os.path.sameopenfile(opened.fileno(), again.fileno()), open("lib").read(),
    ]
first = facts()
done(True)
while True:
    step()
    done(facts() == first or [first, facts()])
"""

WRITING = """
with open("log", "w") as file:
    os.link("log", "log.1")
    os.unlink("log")
    done()
    step()
"""


def link_remaps(folder: Path) -> list[Path]:
    return list(folder.glob("**/link_remap.*"))


@pytest.mark.parametrize("is_cache_there", [later(False), True])
def test_an_upgraded_library_whose_old_version_is_still_cached(
    is_cache_there: bool, start: StartJob, tmp_path: Path
) -> None:
    """As with package managers that link files from a cache. The snapshot has the old one, wherever the cache is."""
    job = start(UPGRADED)
    gpucr.dump(job.pid, tmp_path / "running", leave_running=True)
    assert link_remaps(job.folder) == []
    assert job.go_on() == "True"
    job.dump_and_end(tmp_path / "s")
    assert link_remaps(job.folder) == []
    assert len(list((tmp_path / "s" / "images").glob("ghost-file-*.img"))) == 1
    if not is_cache_there:
        (job.folder / "cache" / "lib").unlink()
    for snapshot, next_turn in (("s", 0), ("running", 1), ("s", 1)):
        gpucr.restore(tmp_path / snapshot)
        assert job.go_on() == "True"
        assert link_remaps(job.folder) == []
        job.kill()
        job.forget(next_turn)
    assert (job.folder / "lib").read_text() == "new"
    assert list(job.folder.glob("*.cr*")) == []


DELETED = """
file = open("scratch", "w+")
file.write("mine")
file.flush()
os.unlink("scratch")
done()
step()
file.seek(0)
done(file.read())
step()
"""


def test_restores_of_the_same_deleted_file_at_once(start: StartJob, tmp_path: Path) -> None:
    """CRIU's own name for the first deleted file of any job: here another restore is just using it."""
    job = start(DELETED)
    job.dump_and_end(tmp_path / "s")
    of_another = job.folder / "scratch.cr.1.ghost"
    of_another.write_text("theirs")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "mine"
    assert of_another.read_text() == "theirs"
    assert list(job.folder.glob("*.ghost")) == [of_another]


def test_an_upgraded_library_and_a_store(start: StartJob, tmp_path: Path) -> None:
    job = start(UPGRADED)
    gpucr.init_store(tmp_path / "store")
    job.dump_and_end(f"{tmp_path}/store#a")
    (job.folder / "cache" / "lib").unlink()
    gpucr.restore(f"{tmp_path}/store#a")
    assert job.go_on() == "True"


def test_an_upgraded_library_in_a_sandbox(start_sandboxed: StartJob, tmp_path: Path) -> None:
    job = start_sandboxed(UPGRADED)
    job.dump_and_end(tmp_path / "s")
    assert link_remaps(job.folder) == []
    (job.folder / "cache" / "lib").unlink()
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "True"


def test_a_file_written_under_a_removed_name(start: StartJob, tmp_path: Path) -> None:
    """The restored job's output would not go into the file with the other name."""
    job = start(WRITING)
    with pytest.raises(gpucr.Unsupported, match="writes to a file whose name is gone, but which has another") as caught:
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert caught.value.code == "GPUCR-LINKED-FILE"
    assert not (tmp_path / "s").exists()
    assert job.pids() == [job.pid]


def test_a_name_that_now_refers_to_another_file(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who can write to the folder must not make gpucr include another file in the snapshot."""
    job = start(UPGRADED)
    replacements: list[tuple[Callable[[Path], None], type[gpucr.GpucrError], str]] = [
        (lambda name: name.hardlink_to(job.folder / "cache" / "other"), gpucr.CriuError, "is not the file of the job"),
        (
            lambda name: name.symlink_to(job.folder / "cache" / "lib"),
            gpucr.SnapshotError,
            "Too many levels of symbolic",
        ),
        (lambda _: None, gpucr.SnapshotError, "No such file"),
    ]
    (job.folder / "cache" / "other").touch()
    for put_instead, error, said in replacements:

        def meanwhile(*arguments: Any, put: Callable[[Path], None] = put_instead, **options: Any) -> Any:
            for name in link_remaps(job.folder):
                name.unlink()
                put(name)
            return save_linked_files(*arguments, **options)

        monkeypatch.setattr(observe, "save_linked_files", meanwhile)
        with pytest.raises(error, match=said):
            gpucr.dump(job.pid, tmp_path / "s")
        assert not (tmp_path / "s").exists()
        assert link_remaps(job.folder) == []
    assert job.go_on() == "True"
