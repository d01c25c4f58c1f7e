"""Reading CRIU's log: synthesised texts for what cannot be produced on every machine (test_failures has the rest)."""

from __future__ import annotations

import pytest

from gpucr.criu.diagnosis import KNOWN_FAILURES, diagnose

HARMLESS = "(00.021600) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"


def error(text: str, place: str = "criu/some.c:1") -> str:
    return f"(00.100000) Error ({place}): {text}\n"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Can't dump file 12 of that type [20600] (chr 195:255): /dev/nvidiactl", "gpu-held"),
        ("Can't handle non-regular mapping on 77's map 7f00 (/dev/nvidia-uvm)", "gpu-held"),
        ("anon_inode: unsupported anon_inode:[io_uring]", "io-uring"),
        ("Can't dump file 9 of that type [600] (unknown anon_inode:[userfaultfd])", "userfaultfd"),
        ("files-reg: Can't dump ghost file /dev/shm/x (deleted) of 34000000 size, increase limit", "ghost-too-large"),
        ("Can't fork for 4711: File exists", "pid-in-use"),
        ("inet: Can't bind inet socket (id 15): Address already in use", "address-in-use"),
        ("inet: Can't bind inet socket (id 15): Cannot assign requested address", "address-missing"),
        ("File tmp/log has bad size 7 (expect 3)", "file-changed"),
        ("files-reg: Can't open file tmp/x on restore: No such file or directory", "file-missing"),
        ("files-reg: Can't link dev/shm/link_remap.5 -> dev/shm/sem.mp-x: No such file or directory", "link-remap"),
        ("files-reg: Can't link dev/shm/link_remap.5 -> dev/shm/sem.mp-x: File exists", "link-remap"),
        ("fsnotify: \tCan't dump that handle", "watch"),
        ("unix: Can't dump half of stream unix connection.", "unix-outside"),
        ("inet: In-flight connection (l) for 1a2b", "in-flight-connection"),
        ("A session leader of 77(77) is outside of its pid namespace", "session-outside"),
        ("tty: Found slave peer index 3 without correspond master peer", "terminal"),
        ("netlink: iptables-restore failed: exited, status=1", "network-lock"),
        ("Timeout reached. Try to interrupt: 0", "freeze-timeout"),
        ("Can't get rlimit 0 for 77: Operation not permitted", "other-uid-limits"),
        ("Unable to interrupt task: 77 (Operation not permitted)", "traced"),
        ("vdso: Unexpected rt vDSO area bounds", "vdso"),
        ("sockets: Can't get 1:16 opt: Operation not supported", "socket-options"),
        (
            "mnt: Mount 77 ./x (master_id: 1 shared_id: 0) has unreachable sharing. Try --enable-external-masters.",
            "mounts",
        ),
        ("Can't lookup mount=27 for fd=1 path=/var/log/job", "foreign-file"),
        ("page-pipe: write failed: No space left on device", "no-space"),
        (
            "Can't restore recv queue data (-1), want (7871720-524:714704:524): No buffer space available",
            "tcp-memory",
        ),
        ("Read 3 bytes while 9 expected from images/core-7.img: No such file or directory", "image-damaged"),
        ("Unable to interrupt task: 77 (No such process)", "process-gone"),
        ("The root process 77 is not a session leader. Consider using --shell-job option", "session-outside"),
        ("send_fds failed (-22)", "io-uring"),
        ("Can't dump nested pid namespace for 77", "nested-namespace"),
        ("Can't dump file 5 of that type [140777] (socket)", "unsupported-file"),
        ("prctl: Can't set exe link: Permission denied", "not-permitted"),
        (
            "libnet_init failed (libnet_open_raw4(): SOCK_RAW allocation failed: Operation not permitted)",
            "not-permitted",
        ),
        ("x86: FPU xsave area present, but host cpu doesn't support it", "processor"),
        ("cpu: CPU instruction capabilities do not match run time", "processor"),
        ("Unable to set a monotonic clock offset: Operation not permitted", "clocks"),
    ],
)
def test_known_failures(line: str, name: str) -> None:
    diagnosis = diagnose(HARMLESS + error(line) + error("Dumping FAILED.", "criu/cr-dump.c:2128"))
    expected = next(failure for failure in KNOWN_FAILURES if failure.name == name)
    assert diagnosis.hint == expected.hint
    assert diagnosis.reason == line
    assert "{" not in diagnosis.meaning


def test_every_known_failure_is_produced_by_a_test() -> None:
    parametrized = test_known_failures.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {name for _, name in parametrized} == {failure.name for failure in KNOWN_FAILURES}


def test_the_message_about_the_file() -> None:
    diagnosis = diagnose(error("File tmp/log has bad size 7 (expect 3)"))
    assert diagnosis.meaning == "the file tmp/log has changed since the dump (size)"


def test_a_harmless_error_is_not_the_reason() -> None:
    diagnosis = diagnose(HARMLESS + error("something new") + error("a consequence"))
    assert (diagnosis.reason, diagnosis.meaning, diagnosis.hint) == ("something new", "something new", None)


def test_a_known_failure_after_an_unknown_line() -> None:
    assert "io_uring" in diagnose(error("something new") + error("unsupported anon_inode:[io_uring]")).meaning


def test_a_warning_if_no_error_is_known() -> None:
    warning = "(00.1) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 77 (Operation not permitted)\n"
    assert "traced" in diagnose(warning + error("Unable to detach from 77: No such process")).meaning
    assert "io_uring" in diagnose(warning + error("unsupported anon_inode:[io_uring]")).meaning


def test_no_other_warning_decides() -> None:
    warning = "(00.1) Warn  (criu/files-reg.c:1): Can't open file x on restore: No such file or directory\n"
    assert diagnose(warning + error("something new")).reason == "something new"


def test_lines_of_the_restored_tasks_own_logs() -> None:
    assert diagnose("pie: 77: Error (criu/pie/restorer.c:1): something new\n").reason == "something new"


@pytest.mark.parametrize("log", ["", HARMLESS])
def test_no_error_in_the_log(log: str) -> None:
    assert diagnose(log, otherwise="told by RPC").reason == "told by RPC"
    assert diagnose("").reason == "it wrote no reason"


def test_a_criu_that_never_started() -> None:
    assert "libnet.so.1" in diagnose("criu: error while loading shared libraries: libnet.so.1: cannot open").reason


def test_where_criu_looks_for_what_is_watched() -> None:
    looked = "(00.1) Warn  (criu/irmap.c:104): irmap: Can't stat /no-such-path: No such file or directory\n"
    assert diagnose(looked + error("fsnotify: \tCan't dump that handle")).code == "GPUCR-WATCH"
    assert diagnose(looked + error("something new")).code is None
