"""The disks that machines boot from: Debian 12 and 13, made once, and gpucr as this clone has it, made when it changes.

``python3 -m tests.machines.images`` makes what is missing. All of it is in ``$XDG_CACHE_HOME/gpucr/test-machines``; a
changed recipe (below, ``initrd.sh``, ``constraints.txt``) makes new images and removes the old ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpucr.criu.install import find_criu
from gpucr.errors import CriuUnavailable

REPOSITORY = Path(__file__).parents[2]
GPUCR = Path("/opt/gpucr")
"""Where gpucr is in a machine: a virtual environment."""
TESTS = Path("/opt/clone")
"""Where the tests are in a machine."""

_HERE = Path(__file__).parent
_DISK = "3G"
_GPUCR_DISK_BYTES = 96 << 20
_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "cpio": "cpio",
    "depmod": "kmod",
}
_BOOT_MODULES = ("virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk")

_PACKAGES = (
    # the system
    *("systemd-sysv", "udev", "dbus", "dbus-user-session", "libpam-systemd", "systemd-container", "kmod", "procps"),
    *("qemu-guest-agent", "iproute2", "nftables", "sudo", "ca-certificates", "apparmor", "util-linux-extra"),
    *("selinux-basics", "selinux-policy-default"),
    # gpucr, its simulator, CRIU
    *("python3", "python3-venv", "gcc", "libc6-dev"),
    *("libnftables1", "libnl-3-200", "libnet1", "libprotobuf-c1", "libcap2"),
    # file systems
    *("xfsprogs", "btrfs-progs", "dmsetup", "nfs-kernel-server", "sshfs", "squashfs-tools", "squashfuse"),
    # other machines
    *("openssh-server", "openssh-client", "rsync", "slurmctld", "slurmd", "slurm-client", "munge"),
)
_WITH_GPUCR = (
    *("pytest", "pytest-timeout", "pytest-xdist", "psutil", "hypothesis", "pyte", "pyyaml"),
    *("prometheus-client", "obstore", "localbucket", "numpy"),
)

_READ_BY_TESTS = ("pyproject.toml", "constraints.txt")
_USER = 1000
_CACHES = (Path("/root/.cache/gpucr"), Path("/home/user/.cache/gpucr"))
_COMPILE = """
import pathlib, gpucr.sim.build, gpucr.interposer.build as interposer, gpucr.interposer.library as library
gpucr.sim.build.build()
interposer.compile_library(pathlib.Path(library.__file__).parent)
"""

# What a machine for a test does without, or with: nobody logs in at its console, and nothing is fetched.
_SETUP = f"""
set -e
echo machine >etc/hostname
printf '127.0.0.1 localhost machine\\n' >etc/hosts
: >etc/fstab
for unit in apt-daily.timer apt-daily-upgrade.timer man-db.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer \\
    getty@tty1.service serial-getty@ttyS0.service systemd-timesyncd.service; do
    ln -sfn /dev/null "etc/systemd/system/$unit"
done
for unit in nfs-server nfs-blkmap nfs-client.target rpcbind.service rpcbind.socket ssh slurmctld slurmd munge \\
    e2scrub_reap networking; do
    chroot . systemctl --quiet disable "$unit" 2>/dev/null || true
done
chroot . passwd --quiet --delete root
chroot . useradd --create-home --shell /bin/bash --uid {_USER} user
mkdir -p etc/systemd/journald.conf.d
printf '[Journal]\\nStorage=persistent\\nSystemMaxUse=32M\\n' >etc/systemd/journald.conf.d/test.conf
mkdir -p etc/systemd/system/qemu-guest-agent.service.d
printf '[Service]\\nLogLevelMax=notice\\n' >etc/systemd/system/qemu-guest-agent.service.d/quiet.conf
printf 'PATH=%s/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\\n' {GPUCR} >>etc/environment
chroot . python3 -m venv --without-pip {GPUCR}
"""


class MachinesMissing(Exception):
    """Why no machine can boot here, in one sentence."""


@dataclass(frozen=True)
class Release:
    """A release of Debian: ``kernel`` is the version of its kernel, ``python`` that of its Python."""

    name: str
    number: int
    kernel: str
    python: str


BOOKWORM = Release("bookworm", 12, "6.1", "3.11")
TRIXIE = Release("trixie", 13, "6.12", "3.13")
RELEASES = (BOOKWORM, TRIXIE)


@dataclass(frozen=True)
class Kernel:
    """A kernel and its initrd; ``name`` as in ``uname -r``."""

    name: str
    program: Path
    initrd: Path


@dataclass(frozen=True)
class Image:
    """A disk that many machines are laid over (raw), and the kernels that fit it, by version."""

    release: Release
    disk: Path
    kernels: dict[str, Kernel]

    def booted(self, kernel: Kernel) -> Path:
        """Where a machine is kept that has booted this kernel: its disk and its memory."""
        return self.disk.with_name(f"booted-{self.release.name}-{kernel.name}.qcow2")


def find_images() -> dict[Release, Image]:
    """The images, if all are there already. Raises MachinesMissing."""
    _check_programs()
    home = _home()
    if not (home / "done").exists():
        raise MachinesMissing("the images of the test machines are not built: scripts/machines builds them")
    return {release: _image(home, release) for release in RELEASES}


def build_images() -> dict[Release, Image]:
    """The images, made if they are missing: needs root, Debian's packages, PyPI, 6 GiB. Raises MachinesMissing."""
    _check_programs()
    home = _home()
    with exclusive(home):
        if not (home / "done").exists():
            if os.geteuid() != 0:
                raise MachinesMissing("the images of the test machines are not built, which only root can do")
            _remove_others(home)
            try:
                for release in RELEASES:
                    _make_kernel(home, release)
                for release in RELEASES:
                    _make_disk(home, release)
            except subprocess.CalledProcessError as e:
                said = (e.stderr or e.stdout or "").strip().splitlines()
                raise MachinesMissing(f"an image cannot be built: {e.cmd[0]}: {said[-1] if said else e}") from e
            (home / "done").touch()
    return {release: _image(home, release) for release in RELEASES}


def gpucr_disk(release: Release) -> Path:
    """A disk that is a tar archive: gpucr of this clone, installed and compiled, and its tests."""
    home = _home()
    files = _tracked()
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path}\0".encode() + (REPOSITORY / path).read_bytes())
    disk = home / f"gpucr-{release.name}-{digest.hexdigest()[:16]}.tar"
    with exclusive(home):
        if not disk.exists():
            for old in home.glob(f"gpucr-{release.name}-*"):
                old.unlink() if old.is_file() else shutil.rmtree(old)
            _pack_gpucr(home, release, files, disk)
    return disk


def _check_programs() -> None:
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        raise MachinesMissing(f"no machine can boot here: install {' '.join(missing)}")


def _home() -> Path:
    recipe = hashlib.sha256(repr((_DISK, _BOOT_MODULES, _PACKAGES, _WITH_GPUCR, _SETUP)).encode())
    for path in (_HERE / "initrd.sh", REPOSITORY / "constraints.txt"):
        recipe.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "gpucr" / "test-machines" / recipe.hexdigest()[:16]
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def _remove_others(home: Path) -> None:
    """Everything that another recipe, or an interrupted run of this one, has left."""
    for folder in home.parent.iterdir():
        if folder != home:
            shutil.rmtree(folder)
    for entry in home.iterdir():
        if not entry.name.startswith(".lock"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _image(home: Path, release: Release) -> Image:
    kernels = {
        version: Kernel(
            _modules(home / f"kernel-{version}").name, home / f"vmlinuz-{version}", home / f"initrd-{version}"
        )
        for version in (each.kernel for each in RELEASES)
    }
    return Image(release, home / f"{release.name}.img", kernels)


def _make_kernel(home: Path, release: Release) -> None:
    """The release's kernel, the modules that machines have, and an initrd that mounts their disk."""
    tree = home / f"kernel-{release.kernel}"
    _say(f"Linux {release.kernel}")
    _bootstrap(release, tree, ("linux-image-cloud-amd64", "busybox-static"), "extract")
    [kernel] = (tree / "boot").glob("vmlinuz-*")
    shutil.copy(kernel, home / f"vmlinuz-{release.kernel}")
    modules = _modules(tree)
    _run("depmod", "--basedir", str(modules.parents[2]), modules.name)
    initrd = tree / "initrd"
    (initrd / "bin").mkdir(parents=True)
    (initrd / "modules").mkdir()
    busybox = next(path for path in (tree / "usr/bin/busybox", tree / "bin/busybox") if path.exists())
    shutil.copy(busybox, initrd / "bin/busybox")
    shutil.copy(_HERE / "initrd.sh", initrd / "init")
    (initrd / "init").chmod(0o755)
    for name in _BOOT_MODULES:
        for module in modules.rglob(f"{name}.ko*"):  # none where it is part of the kernel
            data = module.read_bytes()
            (initrd / f"modules/{name}.ko").write_bytes(lzma.decompress(data) if module.suffix == ".xz" else data)
    names = "\n".join(str(path.relative_to(initrd)) for path in sorted(initrd.rglob("*")))
    packed = subprocess.run(
        ["cpio", "--create", "--format=newc", "--quiet"],
        cwd=initrd,
        input=names.encode(),
        capture_output=True,
        check=True,
    )
    (home / f"initrd-{release.kernel}").write_bytes(packed.stdout)


def _modules(tree: Path) -> Path:
    """The folder of the kernel's modules, wherever its package has it."""
    return next(path for top in ("lib", "usr/lib") for path in (tree / top).glob("modules/*"))


def _make_disk(home: Path, release: Release) -> None:
    root = home / f"root-{release.name}"
    _say(f"Debian {release.number}")
    packages = (*_PACKAGES, "criu") if release is TRIXIE else _PACKAGES
    _bootstrap(release, root, packages, "minbase")
    _run("sh", "-c", _SETUP, cwd=root)
    for other in RELEASES:
        modules = _modules(home / f"kernel-{other.kernel}")
        shutil.copytree(modules, root / "usr/lib/modules" / modules.name, symlinks=True)
    _say(f"gpucr's dependencies on Python {release.python}")
    site = root / GPUCR.relative_to("/") / f"lib/python{release.python}/site-packages"
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", release.python, "--target", str(site)),
        *("-c", str(REPOSITORY / "constraints.txt"), *_dependencies(), *_WITH_GPUCR),
    )
    _copy_criu(root)
    _compile(root, site)
    partial = home / f"{release.name}.partial"
    _run("truncate", "--size", _DISK, str(partial))
    _run("mke2fs", "-q", "-t", "ext4", "-d", str(root), str(partial))
    partial.rename(home / f"{release.name}.img")


def _bootstrap(release: Release, root: Path, packages: tuple[str, ...], variant: str) -> None:
    included = ",".join(packages)
    _run("mmdebstrap", "--quiet", f"--variant={variant}", f"--include={included}", release.name, str(root))


def _dependencies() -> list[str]:
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed = text.partition("\ndependencies = [")[2].partition("]")[0]
    return re.findall(r'"([^"]+)"', listed)


def _copy_criu(root: Path) -> None:
    """The CRIU that gpucr has fetched for this machine: what root's gpucr finds there."""
    try:
        command = find_criu().command
    except CriuUnavailable as e:
        raise MachinesMissing(f"the machines need a CRIU: {e}") from e
    fetched = next((p for part in command for p in Path(part).parents if p.parent.name == "criu"), None)
    if fetched is None:
        raise MachinesMissing(f"the machines need a CRIU that gpucr has fetched, not {command[-1]}: run gpucr criu")
    shutil.copytree(fetched, root / "root/.local/share/gpucr/criu" / fetched.name, symlinks=True)


def _compile(root: Path, site: Path) -> None:
    """By the Python of the machine, which costs a tenth of what it does in the machine."""
    inside = Path("/") / site.relative_to(root)
    _run("chroot", str(root), "python3", "-m", "compileall", "-q", "-j", "2", str(inside), check=False)


def _tracked() -> list[str]:
    listed = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY).split("\0")
    wanted = ("src/", "tests/", "benchmarks/", "docs/", "hatch_build.py", "README.md", *_READ_BY_TESTS)
    left_out = "tests/machines/"  # what is outside of machines
    return [p for p in listed if p.startswith(wanted) and not p.startswith(left_out) and (REPOSITORY / p).is_file()]


def _pack_gpucr(home: Path, release: Release, files: list[str], disk: Path) -> None:
    """A wheel's content, the commands that pip would make of its entry points, and what the machine would compile."""
    root = home / f"root-{release.name}"
    inside = GPUCR / f"lib/python{release.python}/site-packages/gpucr"
    packed = (GPUCR / "bin/gpucr", GPUCR / "bin/cuda-checkpoint", inside, TESTS, *_CACHES)
    wanted = {root / TESTS.relative_to("/") / name: name for name in files}
    package = root / inside.parent.relative_to("/")
    wanted |= {package / name.removeprefix("src/"): name for name in files if name.startswith("src/gpucr/")}
    for path in [*package.glob("gpucr/**/*"), *(root / TESTS.relative_to("/")).rglob("*")]:
        if path.is_file() and path not in wanted and "__pycache__" not in path.parts:
            path.unlink()
    for path, name in wanted.items():  # what is as before stays, and so does its bytecode
        if not path.exists() or path.read_bytes() != (REPOSITORY / name).read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, path)
    _write_command(root / packed[0].relative_to("/"), "import sys\nfrom gpucr.__main__ import main\nsys.exit(main())\n")
    drop_in = (REPOSITORY / "scripts/cuda-checkpoint").read_text().partition("\n")[2]
    _write_command(root / packed[1].relative_to("/"), drop_in)
    _compile(root, root / inside.relative_to("/"))
    own = ("env", "-i", "HOME=/root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    _run("chroot", str(root), *own, str(GPUCR / "bin/python3"), "-c", _COMPILE)
    made, also = (root / path.relative_to("/") for path in _CACHES)
    shutil.rmtree(also, ignore_errors=True)
    shutil.copytree(made, also, symlinks=True)
    with tarfile.open(disk.with_suffix(".partial"), "w") as archive:
        for path in packed:
            archive.add(root / path.relative_to("/"), str(path.relative_to("/")), filter=_owned)
    os.truncate(disk.with_suffix(".partial"), _GPUCR_DISK_BYTES)  # a booted machine finds another one of the same size
    disk.with_suffix(".partial").rename(disk)


def _owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = _USER if member.name.startswith("home/user") else 0
    member.uname = member.gname = ""
    return member


def _write_command(path: Path, code: str) -> None:
    path.write_text(f"#!{GPUCR}/bin/python3\n{code}")
    path.chmod(0o755)


def _run(*command: str, cwd: Path | None = None, check: bool = True) -> str:
    return subprocess.run(command, cwd=cwd, check=check, capture_output=True, text=True).stdout


def _say(what: str) -> None:
    sys.stderr.write(f"Building test machines: {what}\n")


@contextmanager
def exclusive(folder: Path, what: str = "") -> Iterator[None]:
    """Nobody else makes this in this folder meanwhile."""
    with (folder / f".lock{what}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        build_images()
    except MachinesMissing as e:
        sys.exit(f"error: {e}")
