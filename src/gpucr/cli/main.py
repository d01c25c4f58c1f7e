"""The `gpucr` command: finds the sub-command, and turns errors into messages and exit codes in one place."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import click

from gpucr.cli import failures
from gpucr.cli.output import JsonWanted, lost_stdout, prepare_streams
from gpucr.cli.suggesting import SuggestingGroup
from gpucr.errors import GpucrError, Interrupted, InvalidRequest, OutputLost
from gpucr.linux.private_folders import runtime_folder
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.left_behind import remove_left_behind
from gpucr.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_COMMANDS = {
    "batch": "run a job under a batch system, and continue it at the next start",
    "borrow": "run a command on GPUs that lower-priority jobs give up for it",
    "completion": "print a shell completion script",
    "connections": "list connections that are kept for a restore, or give them up",
    "copy": "copy snapshots from one store to another",
    "criu": "show the CRIU that gpucr uses; fetch one",
    "demo": "dump and restore a small CUDA program, and check it",
    "diff": "show what differs between two snapshots of a store",
    "doctor": "show what blocks this machine or a job, and how to fix it",
    "dump": "write a job to a folder or a store and end it, or keep it running",
    "exec": "run a command inside a job's namespaces",
    "explain": "print what an error code means and what to do",
    "helper": "let ordinary users have root's CRIU for their own jobs",
    "hook": "let container runtimes checkpoint containers that use GPUs",
    "inspect": "show what a snapshot holds",
    "jobs": "list the jobs that gpucr started",
    "kill": "end a job at once, or send it a signal",
    "logs": "print what a job printed",
    "ls": "list the snapshots of a store",
    "metrics": "print metrics of supervised jobs, for Prometheus",
    "move": "move a running job to other GPUs",
    "nodes": "dump and restore a job that is on several nodes",
    "on-demand": "let a job sleep until it is asked",
    "prune": "remove old snapshots and unneeded data from a store",
    "ps": "list the processes that use CUDA",
    "restore": "bring a job back from a snapshot",
    "resume": "bring a suspended job back onto its GPUs",
    "rm": "remove a snapshot from a store",
    "run": "start a job that can be frozen and brought back",
    "service": "start supervised jobs after a boot, with systemd",
    "sim": "the simulated driver, for machines without a GPU",
    "state": "show the CUDA state of a job's processes",
    "stop": "end a job: SIGTERM, then SIGKILL",
    "store": "make a store of snapshots; manage its keys",
    "supervise": "checkpoint a job, and restore it when it fails",
    "suspend": "move a job's GPU memory to host memory and release its GPUs",
    "top": "watch the jobs that use GPUs, suspend and resume them with a key",
    "verify": "check snapshots without restoring them",
    "wait": "wait until a job has ended",
}

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    failed; the job is as it was found
  2    bad request (no such process, not CUDA, no privileges, ...)
  3    refused: this workload or machine cannot do it; nothing was changed
  4    a part is missing or broken (driver, CRIU, ...)
  5    the snapshot or its folder cannot be used
  6    out of time; the job is as it was found
  7    done, but the report could not be printed
  10   failed, and the job could not be brought back to how it was
  130  interrupted; the job is as it was found"""


class _LazyGroup(SuggestingGroup):
    """Loads only the sub-command that is run: `gpucr state` must not pay for the imports of `gpucr dump`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        found = importlib.import_module(f"gpucr.cli.{cmd_name.replace('-', '_')}").command
        if not gc.isenabled():  # disabled in `gpucr.__main__`
            gc.freeze()
            gc.enable()
        if not isinstance(found, click.Command):
            raise TypeError(f"gpucr.cli.{cmd_name}.command is not a command")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, without loading any of them."""
        from click.shell_completion import CompletionItem  # only a shell that completes needs it

        found = [
            CompletionItem(name, help=_COMMANDS[name]) for name in sorted(_COMMANDS) if name.startswith(incomplete)
        ]
        return found or super().shell_complete(ctx, incomplete)


@click.command("gpucr", cls=_LazyGroup, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpucr")
def command() -> None:
    """Checkpoint and restore running CUDA processes.

    \b
    gpucr suspend 4711                  free the GPUs, keep the job in host memory
    gpucr resume 4711                   and continue
    gpucr dump 4711 --to /var/snap/a    write the job to disk and end it
    gpucr restore /var/snap/a           and bring it back, also after a reboot
    gpucr dump 4711 --to STORE#a        write to a store only what it lacks
    """


def main() -> NoReturn:
    """Run the command line and exit with the outcome's code."""
    prepare_streams()
    threading.excepthook, sys.unraisablehook = failures.in_a_thread, failures.ignored
    # Until the process ends: once the outcome is decided, no signal changes the exit code.
    interrupts = Interrupts(_say_too_late).__enter__()
    wanted = JsonWanted()
    try:
        code = _run(wanted, interrupts)
    except KeyboardInterrupt:
        code = _failed(lambda: Interrupted("interrupted"), wanted, Interrupted.exit_code)
    lost = _flushed_stdout()
    if code == 0 and lost is not None and not isinstance(lost, BrokenPipeError):  # otherwise the reader had enough
        code = _failed(lambda: _output_lost(lost), wanted, OutputLost.exit_code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # while Python ends
    sys.exit(code)


def _run(wanted: JsonWanted, interrupts: Interrupts) -> int:
    try:
        interrupts.raise_at_once()
        _end_left_behind()
        command.main(prog_name="gpucr", standalone_mode=False, obj=wanted)
        interrupts.commit()
    except SystemExit as end:
        interrupts.commit()
        return end.code if isinstance(end.code, int) else 0
    except GpucrError as error:
        interrupts.commit()
        failed = error
        return _failed(lambda: failed, wanted, error.exit_code)
    except click.ClickException as error:
        interrupts.commit()
        wanted.is_wanted |= "--json" in sys.argv  # an unknown option is detected before options are processed
        failures.show_usage(error, wanted)
        return InvalidRequest.exit_code
    except click.Abort as abort:  # click's word for Ctrl-C
        raise KeyboardInterrupt from abort
    except Exception as error:  # noqa: BLE001 - never a traceback
        interrupts.commit()
        cause, is_done = error, interrupts.has_succeeded
        code = OutputLost.exit_code if is_done else GpucrError.exit_code
        return _failed(lambda: failures.unexpected(cause, has_succeeded=is_done), wanted, code)
    return 0


def _end_left_behind() -> None:
    """End what a gpucr that was killed together with its guard has left, and connections kept for nobody."""
    if "_GPUCR_COMPLETE" in os.environ:
        return
    remove_left_behind()
    with contextlib.suppress(OSError):
        if any(os.scandir(runtime_folder() / "network" / "kept")):
            from gpucr.network import kept  # hardly ever needed

            kept.give_up_lost()


def _say_too_late(reason: str) -> None:
    with contextlib.suppress(OSError):  # not through Python's buffers: a signal may interrupt a write to them
        os.write(2, f"{reason}\n".encode())


def _output_lost(reason: OSError) -> OutputLost:
    return OutputLost(
        f"what was to be printed cannot be written to stdout: {reason.strerror or reason}",
        hint="the operation succeeded; `gpucr jobs` and `gpucr ps` show what became of a job",
    )


def _flushed_stdout() -> OSError | None:
    """Why not all output could be written to stdout; None: it was."""
    try:
        sys.stdout.flush()
    except MemoryError as e:
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), e)
    return lost_stdout()


def _failed(make: Callable[[], GpucrError], wanted: JsonWanted, exit_code: int) -> int:
    """Show the error, and return its exit code, or ``exit_code`` if there is not enough memory to create it.

    The exit code reports the job's fate, and must not change.
    """
    try:
        error = make()
        exit_code = error.exit_code
        failures.show(error, wanted)
    except MemoryError:
        with contextlib.suppress(OSError):
            os.write(2, b"error: out of memory\n")
    return exit_code
