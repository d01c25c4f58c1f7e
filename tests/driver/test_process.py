"""gpucr.Process: the argument rules of cuda.core.checkpoint.Process, and its extensions."""

from __future__ import annotations

import ctypes
import os
import uuid
from typing import Any

import pytest

from gpucr.driver import gpus
from gpucr.driver.process import Process
from gpucr.errors import IllegalState, NotACudaProcess, ProcessNotFound
from gpucr.model import uuid_bytes
from tests.counter import CounterFactory

UUIDS = ("GPU-6b1e4d2c-0f3a-4c52-9c53-0a6f5a1d7e88", "GPU-7f8dc54f-9e1b-4d52-8bc6-09d2a4a4a8b1")


def _cuuuid(raw: bytes) -> Any:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    made = bindings.CUuuid()
    ctypes.memmove(made.getPtr(), raw, len(raw))
    return made


@pytest.mark.parametrize("pid", [True, "1", 1.0, None, b"1"])
def test_pid_of_wrong_type(pid: Any) -> None:
    with pytest.raises(TypeError):
        Process(pid)


@pytest.mark.parametrize("pid", [0, -1])
def test_pid_not_positive(pid: int) -> None:
    with pytest.raises(ValueError, match="pid"):
        Process(pid)


@pytest.mark.parametrize(
    ("timeout_ms", "error"), [(True, TypeError), (1.5, TypeError), ("1", TypeError), (-1, ValueError)]
)
def test_bad_timeout(timeout_ms: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout_ms"):
        Process(os.getpid()).lock(timeout_ms)


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ([("a", "b")], TypeError),
        ("GPU-", TypeError),
        ({1: 2}, TypeError),
        ({"GPU-1": "GPU-2"}, ValueError),
        ({b"short": b"short"}, ValueError),
        ({"GPU-" + "0" * 31: "1" * 32}, ValueError),
        ({"GPU-GPU-" + "0" * 32: "1" * 32}, ValueError),
        ({UUIDS[0]: UUIDS[0], UUIDS[0].removeprefix("GPU-"): UUIDS[1]}, ValueError),
        ({UUIDS[0]: UUIDS[0], UUIDS[1]: uuid_bytes(UUIDS[0])}, ValueError),
    ],
)
def test_bad_gpu_mapping(counter: CounterFactory, mapping: Any, error: type[Exception]) -> None:
    program = counter("--mib", "4")
    process = Process(program.pid)
    process.lock()
    process.checkpoint()
    with pytest.raises(error):
        process.restore(mapping)
    assert process.state == "checkpointed"
    process.restore()
    process.unlock()
    assert program.send("verify") == "ok"


def test_arguments_are_checked_before_the_driver_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        pytest.fail("the driver was loaded")

    monkeypatch.setattr("gpucr.driver.process.load_driver", no_driver)
    with pytest.raises(TypeError, match="gpu_mapping"):
        Process(1).restore([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_ms"):
        Process(1).lock(-1)


def test_pid_is_read_only() -> None:
    process = Process(7)
    assert process.pid == 7
    with pytest.raises(AttributeError):
        process.pid = 8  # type: ignore[misc]


def test_the_cycle_of_states(counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    process = Process(program.pid)
    assert program.ask() == 101
    seen = [process.state]
    for step in (process.lock, process.checkpoint, process.restore, process.unlock):
        step()
        seen.append(process.state)
    assert seen == ["running", "locked", "checkpointed", "locked", "running"]
    assert program.ask() == 102


def test_restore_thread_belongs_to_the_process(counter: CounterFactory) -> None:
    program = counter()
    assert os.path.isdir(f"/proc/{program.pid}/task/{Process(program.pid).restore_thread_id}")


def test_illegal_state_has_its_own_exception(counter: CounterFactory) -> None:
    program = counter()
    with pytest.raises(IllegalState) as caught:
        Process(program.pid).checkpoint()
    assert caught.value.state == "running"


def test_process_without_cuda(process_without_cuda: int) -> None:
    with pytest.raises(NotACudaProcess):
        _ = Process(process_without_cuda).state


def test_a_missing_process() -> None:
    with pytest.raises(ProcessNotFound):
        _ = Process(2**31 - 1).state


@pytest.mark.parametrize("form", ["text", "without prefix", "digits", "bytes", "uuid", "CUuuid"])
def test_forms_of_uuid_in_the_gpu_mapping(counter: CounterFactory, form: str) -> None:
    uuids = [gpu.uuid for gpu in gpus.list_gpus()]
    forms: dict[str, list[Any]] = {
        "text": list(uuids),
        "without prefix": [text.removeprefix("GPU-") for text in uuids],
        "digits": [uuid_bytes(text).hex().upper() for text in uuids],
        "CUuuid": [_cuuuid(uuid_bytes(text)) for text in uuids] if form == "CUuuid" else [],
        "bytes": [uuid_bytes(text) for text in uuids],
        "uuid": [uuid.UUID(bytes=uuid_bytes(text)) for text in uuids],
    }
    program = counter("--mib", "4")
    process = Process(program.pid)
    process.lock()
    process.checkpoint()
    process.restore(dict(zip(forms[form], forms[form], strict=True)))
    process.unlock()
    assert program.send("verify") == "ok"
