"""Entry point of the `gpucr` command and of `python3 -m gpucr`.

Imported before anything that could fail, so that a failure to load gpucr is reported in one line.
"""

import gc
import os
import sys

_reserve: list[bytes] = []
"""Address space that is given back to say that there is no memory. It is never touched, so it costs none."""


def main() -> None:
    """Load the command line and run it. If it cannot be loaded: exit code 4, or 130 after Ctrl-C."""
    gc.disable()  # off while modules load, which make no garbage: saves a sixth of the start
    try:
        _reserve.append(bytes(2 << 20))
        if sys.argv[1:2] == ["batch"]:
            _block_signals()
        _load_msgspec()
        from gpucr.cli.main import main as run
    except KeyboardInterrupt:
        _end_interrupted()
    except Exception as error:  # noqa: BLE001 - anything: memory, open files, a missing file
        _reserve.clear()
        what = str(error) or type(error).__name__
        hint = "see its limits (ulimit -a), or reinstall it"
        _end(4, f"gpucr cannot be loaded: {what}", hint, "GPUCR-BROKEN-INSTALL")
    try:
        run()
    except KeyboardInterrupt:  # before its first line, or after its last
        _end_interrupted()
    except MemoryError:  # not covered by the code that turns errors into messages
        _end(1, "gpucr has too little memory", "`gpucr ps` shows where the job is", "GPUCR-NO-MEMORY")
    except SystemExit as end:
        try:
            _end_at_once(end)
        except MemoryError:  # no memory even for this; Python would print a traceback
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _block_signals() -> None:
    """Until the command listens (`gpucr.cli.batch`): a batch system takes an end by a signal for the job's own."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _load_msgspec() -> None:
    """It would load all of typing_extensions, if installed, for names that `typing` has too."""
    if "typing_extensions" in sys.modules:
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]


def _end_at_once(end: SystemExit) -> None:
    """Exit without destroying every object, a fifth of a short command's time; not while a thread works."""
    import contextlib
    import threading

    if not isinstance(end.code, int):
        return
    with contextlib.suppress(MemoryError):  # without memory, destroying objects fails too, with messages from Python
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, MemoryError):  # lost output already has its exit code
            stream.flush()
    os._exit(end.code)


def _end_interrupted() -> None:
    _end(130, "interrupted", "nothing was done", "GPUCR-INTERRUPTED")


def _end(exit_code: int, message: str, hint: str, code: str) -> None:
    _reserve.clear()
    try:
        os.write(2, f"error: {message}\nhint:  {hint}\ncode:  {code}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(exit_code)


if __name__ == "__main__":
    main()
