"""Build the simulated driver and its programs from their C sources, and name the variables that use them.

A wheel has them built.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gpucr.errors import SimulatorUnavailable
from gpucr.linux import trusted_paths

SOURCES = Path(__file__).parent / "c"
SHIPPED = Path(__file__).parent / "built"
"""Made when the wheel was built."""

FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra")
# Symbolic: no library loaded earlier can interpose its functions, in calls or in results of cuGetProcAddress.
_LIBRARY_FLAGS = ("-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wl,-z,defs", "-Wl,-Bsymbolic")
_BUILD_TIMEOUT_S = 120

_MACHINE = ("machine.c", "abilities.c", "procfs.c", "ledger.c", "exported.c")
_CUDA = (
    "results.c", "thread.c", "gate.c", "memory.c", "staging.c", "context.c", "execution.c", "collective.c", "device.c",
    "api.c", "proc_address.c", "blake3.c",
)  # fmt: skip
_SHARING = ("view.c", "host_memory.c", "peer.c", "ipc.c", "vmm.c", "multicast.c", "pointer.c", "event.c", "graph.c")
_CHECKPOINT = ("faults.c", "watcher.c", "restore_thread.c", "control.c", "checkpoint_api.c", "custom.c", "custom_api.c")


class Product(Struct, frozen=True):
    """One build product: its path in the folder, its C sources and its compiler flags."""

    path: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]


def _library(path: str, sources: tuple[str, ...], *flags: str) -> Product:
    return Product(path, sources, (*_LIBRARY_FLAGS, f"-Wl,-soname,{Path(path).name}", *flags))


PRODUCTS = (
    _library("libcuda.so.1", _MACHINE + _CUDA + _SHARING + _CHECKPOINT),
    _library("libnvidia-ml.so.1", (*_MACHINE, "nvml.c")),
    _library("old/libcuda.so.1", _MACHINE + _CUDA + _SHARING, "-DGPUCR_SIM_OLD_DRIVER"),
    _library("old/libnvidia-ml.so.1", (*_MACHINE, "nvml.c"), "-DGPUCR_SIM_OLD_DRIVER"),
    Product("counter", ("counter.c", "counter_state.c", "cuda.c"), ("-ldl", "-pthread")),
    Product("ranks", ("ranks.c", "rank.c", "cuda.c"), ("-ldl",)),
)


def build(cache_dir: Path | None = None) -> Path:
    """The folder that holds libcuda.so.1, libnvidia-ml.so.1 and counter; compiles them if they are missing.

    It is the wheel's, if gpucr was installed from one. Else its name is a digest of the sources and flags, so a new
    version never uses an old build. Several processes may build at once: each works in its own folder, and the first to
    finish installs it. ``cache_dir`` defaults to ``$XDG_CACHE_HOME/gpucr/sim``.

    Raises SimulatorUnavailable if there is no C compiler or it fails, and where the folder cannot be made.
    """
    if SHIPPED.is_dir():
        return SHIPPED
    parent = cache_dir if cache_dir is not None else _default_cache_dir()
    folder = parent / _digest()
    try:
        trusted_paths.require_ours(folder)  # every program on the simulated driver loads it
        if os.path.isdir(folder):  # which, unlike Path.is_dir, does not raise if the caller may not look
            return folder
        trusted_paths.make_private(parent)
        work = Path(tempfile.mkdtemp(prefix="build-", dir=parent))
    except OSError as e:
        raise SimulatorUnavailable(
            f"the simulated driver cannot be built: {parent} cannot be used: {e.strerror}",
            hint="set XDG_CACHE_HOME to a folder that only this user can write",
        ) from e
    try:
        compile_products(work)
        _move_into_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def compile_products(folder: Path) -> list[Path]:
    """Everything, made in ``folder`` with ``$CC`` or cc. Raises SimulatorUnavailable as `build` does."""
    for product in PRODUCTS:
        _compile(product, folder)
    return [folder / product.path for product in PRODUCTS]


def environment(
    gpus: str = "2x16GiB",
    *,
    state_dir: Path | None = None,
    driver: Literal["current", "old"] = "current",
    fixed_cost_ms: int | None = None,
    faults: str | None = None,
    machine: str | None = None,
) -> dict[str, str]:
    """The environment variables that make programs use the simulator instead of the driver.

    ``gpus`` is a comma-separated list of ``[COUNTx]SIZE`` (``2x16GiB,80GiB``). ``state_dir``: where the processes of
    one simulated machine account for device memory. ``driver="old"`` is a driver without the checkpoint API. ``faults``
    is read by target processes when they start CUDA; docs/reference/simulator.md has the syntax. Another ``machine``
    name gives GPUs with other UUIDs.

    Raises SimulatorUnavailable as `build` does.
    """
    folder = build()
    if driver == "old":
        folder = folder / "old"
    present = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path not in ("", str(folder))]
    variables = {
        "LD_LIBRARY_PATH": ":".join([str(folder), *present]),
        "GPUCR_SIM_GPUS": gpus,
        "GPUCR_SIM_STATE": str(state_dir.absolute() if state_dir is not None else _default_state_dir()),
    }
    optional = {
        "GPUCR_SIM_FIXED_COST_MS": None if fixed_cost_ms is None else str(fixed_cost_ms),
        "GPUCR_SIM_FAULTS": faults,
        "GPUCR_SIM_MACHINE": machine,
    }
    return variables | {name: value for name, value in optional.items() if value is not None}


def _default_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root.startswith("/") else Path.home() / ".cache") / "gpucr" / "sim"


def _default_state_dir() -> Path:
    return Path("/tmp") / f"gpucr-sim-{os.geteuid()}"  # noqa: S108 (the libraries make it 0700)


def _source_files() -> Iterator[Path]:
    return (path for path in sorted(SOURCES.iterdir()) if path.suffix in (".c", ".h"))


def _digest() -> str:
    digest = hashlib.sha256(repr((FLAGS, PRODUCTS, _compiler())).encode())
    for path in _source_files():
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or "cc")


def _compile(product: Product, folder: Path) -> None:
    output = folder / product.path
    output.parent.mkdir(mode=0o700, exist_ok=True)
    sources = [str(SOURCES / name) for name in product.sources]
    command = [*_compiler(), *FLAGS, "-o", str(output), *sources, *product.flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S)
    except FileNotFoundError as e:
        raise SimulatorUnavailable(
            f"the simulated driver cannot be built: there is no C compiler {_compiler()[0]!r}",
            hint="install a C compiler (Debian, Ubuntu: `apt install gcc libc6-dev`) or name one in CC",
        ) from e
    except subprocess.TimeoutExpired as e:
        raise SimulatorUnavailable(f"the C compiler did not finish {product.path} in {_BUILD_TIMEOUT_S} s") from e
    if done.returncode != 0:
        raise SimulatorUnavailable(
            f"the C compiler failed on {product.path}: {_first_error(done.stderr)}",
            hint="the C library's and the kernel's headers are needed (Debian, Ubuntu: `apt install libc6-dev`)",
        )


def _first_error(compiler_output: str) -> str:
    lines = compiler_output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")


def _move_into_place(work: Path, folder: Path) -> None:
    try:
        work.rename(folder)
    except OSError:
        if not folder.is_dir():  # someone else's build of the same sources is as good
            raise
