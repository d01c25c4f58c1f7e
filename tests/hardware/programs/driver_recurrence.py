"""A program on the bare driver API, without a kernel: its state lives in device memory between the steps.

It needs nothing but libcuda.so.1, so it also runs if no toolkit and no framework is installed.
"""

from __future__ import annotations

import ctypes
import hashlib

from tests.hardware.programs.recorder import Recorder

SIZE_BYTES = 8 << 20


class DeviceBuffer:
    """Device memory in the primary context of GPU 0."""

    def __init__(self, size_bytes: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.size_bytes = size_bytes
        self._address = ctypes.c_uint64()
        device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.make_current()
        self._call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(size_bytes))

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._cuda, function)(*arguments)
        if result != 0:
            raise SystemExit(f"{function} gave {result}")

    def make_current(self) -> None:
        """For the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy to the device."""
        self._call("cuMemcpyHtoD_v2", self._at(offset), data, ctypes.c_size_t(len(data)))

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Copy from the device; without a length up to the end."""
        count = self.size_bytes - offset if length is None else length
        data = ctypes.create_string_buffer(count)
        self._call("cuMemcpyDtoH_v2", data, self._at(offset), ctypes.c_size_t(count))
        return data.raw

    def _at(self, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self._address.value + offset)


def main() -> None:
    """Replace the device's bytes by a stream that is derived from all of them, and note their digest, each step."""
    recorder = Recorder("driver API recurrence")
    buffer = DeviceBuffer(SIZE_BYTES)
    buffer.write(hashlib.shake_128(b"gpucr").digest(SIZE_BYTES))
    for step in range(recorder.steps):
        digest = hashlib.sha256(buffer.read()).digest()
        buffer.write(hashlib.shake_128(digest).digest(SIZE_BYTES))
        recorder.note(step, int.from_bytes(digest[:8], "little"))
        if step == 0:
            recorder.ready()


if __name__ == "__main__":
    main()
