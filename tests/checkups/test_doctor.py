"""`gpucr doctor`, `gpucr.doctor` of the machine, and what --fix does and undoes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpucr
from gpucr import DoctorReport, Finding
from gpucr.checkups import memory, repairs
from gpucr.cli import doctor as cli
from gpucr.criu.install import CriuInstall
from gpucr.diagnosis.canaries.results import WHAT, CanaryOutcome, CanaryResult, MeasuredMachine, ProbeReport
from gpucr.errors import CriuUnavailable, Unsupported
from tests.checkups.judging import severities
from tests.children import NOBODY_UID, sleeper
from tests.command import run

NO_CRIU = Finding("blocking", "none", "PATH", "no dump", "fetch", repair="fetch-criu", about="CRIU")
BLOCKING = Finding("blocking", "it is full", "statvfs", "no dump", "empty it", code="GPUCR-NO-SPACE", about="disk")
SPOILT = Finding("warning", "none", "deny", "slow", "echo", repair="huge-pages-shared", about="huge pages")


@pytest.fixture(autouse=True)
def machine_with_peers(sim_only: None, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs that reach each other, and nothing measured yet."""
    monkeypatch.setenv("GPUCR_SIM_PEERS", "1")
    return monkeypatch


def printed(*arguments: object) -> dict[str, Any]:
    """What `gpucr doctor --json` prints, even if something blocks it on this machine."""
    done = run("doctor", *arguments, "--json")
    assert done.returncode in (0, 3), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["blocked"] is (done.returncode == 3)
    assert found["blocked"] is any(each["severity"] == "blocking" for each in found["checkups"])
    return found


def findings(found: dict[str, Any], about: str) -> list[dict[str, Any]]:
    return [each for each in found["checkups"] if each["about"] == about]


# --- the machine ------------------------------------------------------------------------------------------------


def test_every_part_of_the_machine_is_checked() -> None:
    found = gpucr.doctor().checkups
    severities(found)
    assert {each.about for each in found} == {
        "driver", "GPUs", "probe", "privileges", "ptrace", "seccomp", "kernel", "processor", "CRIU", "connections",
        "huge pages", "host memory", "cgroups", "disk", "containers",
    }  # fmt: skip


@pytest.mark.root
def test_without_privileges_it_reports_what_it_could_not_check(tmp_path: Path) -> None:
    code = (
        "import os, gpucr; gpucr.doctor()\n"  # loads all that nobody may not read in every checkout
        f"os.setuid({NOBODY_UID}); os.environ['HOME'] = '/nonexistent'\n"
        "for each in gpucr.doctor(to='/usr').checkups: print(each.about, each.severity, sep=': ')\n"
        f"print(*[each.what for each in gpucr.doctor(to={str(tmp_path / 'new')!r}).checkups if each.about == 'disk'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = set(done.stdout.splitlines())
    assert {"privileges: warning", "huge pages: unknown", "disk: blocking"} <= said
    assert str(tmp_path) not in done.stdout, "a folder that nobody may look into"
    assert {"CRIU: unknown", "CRIU: warning"} & said, "one that only root can have tried, or that only root finds"


def test_a_machine_without_a_driver() -> None:
    """It has no GPU either: that is a warning, since jobs without CUDA can be dumped there."""
    done = subprocess.run(
        [sys.executable, "-m", "gpucr", "doctor", "--json"],
        env={**os.environ, "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert [each["severity"] for each in findings(found, "driver")] == ["warning"]
    assert found["probe"] is None


def test_no_criu_ends_with_exit_code_3(machine_with_peers: pytest.MonkeyPatch) -> None:
    machine_with_peers.setenv("GPUCR_CRIU", "/nonexistent/criu")
    found = printed()
    (one,) = findings(found, "CRIU")
    assert one["repair"] == "fetch-criu"
    assert one["severity"] == ("blocking" if os.geteuid() == 0 else "warning")


# --- what was measured ------------------------------------------------------------------------------------------


def test_without_results() -> None:
    assert "nothing was measured on this machine yet" in run("doctor").stdout
    assert printed()["probe"] is None


def test_one_canary_is_measured_and_shown_later() -> None:
    done = run("doctor", "--probe", "--only", "managed", "--only", "plain")
    said = [line.partition(" (")[0] for line in done.stderr.splitlines()]
    assert said[:2] == ["plain: comes back", "managed: refused"]
    table = done.stdout.partition("CANARY")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in table] == ["plain", "managed"]
    assert run("doctor").stdout.partition("CANARY")[2].partition("\n\n")[0].splitlines()[1:] == table
    results = printed()["probe"]["canaries"]
    assert [(result["name"], result["result"]) for result in results] == [("plain", None), ("managed", 801)]


def test_a_machine_that_restores_nothing(machine_with_peers: pytest.MonkeyPatch) -> None:
    machine_with_peers.setenv("GPUCR_SIM_FAULTS", "restore=999")
    done = run("doctor", "--probe", "--only", "plain", "-q")
    assert done.returncode == 3
    assert "this machine does not bring back even a plain CUDA program" in done.stderr
    assert "code:  GPUCR-PROBE" in done.stderr
    assert done.stdout == "", "quiet"


@pytest.mark.parametrize(
    ("outcome", "severity"), [("lost", "warning"), ("refused", "warning"), ("timed out", "unknown")]
)
def test_lost_memory_is_not_ok(outcome: str, severity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "managed"
    result = CanaryResult(name, CanaryOutcome(outcome), "", None, None, None, 0.1, "2026-11-21T14:02:11Z")
    report = ProbeReport(MeasuredMachine("580", (), "6.18"), (result,), None)
    monkeypatch.setattr("gpucr.checkups.doctor.last_probe", lambda: report)
    (found,) = [each for each in gpucr.doctor().checkups if each.about == "probe"]
    assert (found.severity, outcome in found.evidence, WHAT[name] in found.what) == (severity, True, True)


def test_unusable_results() -> None:
    report = gpucr.probe(["plain"], canary_timeout_s=1800)
    assert report.path is not None
    Path(report.path).write_text("{}")
    done = run("doctor")
    assert f"warning: {report.path} is left out: there is no `schema`; this gpucr reads" in done.stderr
    assert "nothing was measured" in done.stdout


# --- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("--only", "plain"), ("--probe", "--only", "parrot"), ("7", "--probe"), ("7", "--fix")],
)
def test_conflicting_options(arguments: tuple[str, ...]) -> None:
    assert run("doctor", *arguments).returncode == 2


def test_a_bucket_is_not_checked_as_a_folder() -> None:
    done = run("doctor", "--to", "s3://bucket/prefix")
    assert done.returncode == 2
    assert "s3://bucket/prefix is no folder" in done.stderr


def test_a_job() -> None:
    with sleeper() as child:
        found = printed(child.pid)
    assert [each["severity"] for each in findings(found, "job")] == ["ok"]
    assert found["probe"] is None


def test_a_name_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(monkeypatch, Finding("ok", "a \x1b[31mred\x1b[0m name", "/proc", about="job"))
    assert "\x1b" not in capsys.readouterr().out


def test_only_blocking_findings_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    shown(monkeypatch, SPOILT)
    with pytest.raises(Unsupported, match=r"blocking: it is full \(statvfs\), and 1 more") as caught:
        shown(monkeypatch, SPOILT, BLOCKING, BLOCKING)
    assert (caught.value.exit_code, caught.value.code, caught.value.hint) == (3, "GPUCR-NO-SPACE", "empty it")


def test_a_finding_has_its_evidence_consequence_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(monkeypatch, SPOILT)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [line.split()[0] for line in lines] == ["warning", "seen:", "so:", "do:"]
    assert lines[3].endswith("(gpucr doctor --fix does it)")


def shown(monkeypatch: pytest.MonkeyPatch, *checkups: Finding) -> None:
    """Run the command with these findings."""
    monkeypatch.setattr(cli, "doctor", lambda *_, **__: DoctorReport(checkups))
    cli.command.main([], standalone_mode=False)


# --- --fix ------------------------------------------------------------------------------------------------------


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A machine with all huge pages forbidden, in the test's own files."""
    shared, private = tmp_path / "shmem_enabled", tmp_path / "enabled"
    shared.write_text("always within_size advise never [deny] force\n")
    private.write_text("always madvise [never]\n")
    for module in (memory, repairs):
        monkeypatch.setattr(module, "SHARED_POLICY", shared)
        monkeypatch.setattr(module, "PRIVATE_POLICY", private)
    monkeypatch.setattr(memory, "_why_small", lambda: "the machine forbids it")
    monkeypatch.setattr("gpucr.linux.capabilities.can_checkpoint_processes", lambda: True)
    return shared, private


def test_huge_pages_are_enabled_again(policies: tuple[Path, Path]) -> None:
    shared, private = policies
    report = gpucr.doctor(fix=True)
    done = {each.name: each for each in report.repairs}
    assert set(done) >= {"huge-pages-shared", "huge-pages-private"}
    assert (shared.read_text(), private.read_text()) == ("never", "madvise")
    assert done["huge-pages-shared"].undo == f"echo deny > {shared}"
    assert done["huge-pages-private"].undo == f"echo never > {private}"


def test_a_cancelled_fix_reports_what_is_fixed(policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cancel, real = gpucr.Cancellation(), repairs._choose

    def choose(*arguments: object) -> gpucr.Repair:
        cancel.cancel("the machine is wanted")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(repairs, "_choose", choose)
    with pytest.raises(gpucr.Interrupted, match=r"^the machine is wanted; nothing else was changed$") as caught:
        gpucr.doctor(fix=True, cancel=cancel)
    before = ("always within_size advise never [deny] force\n", "always madvise [never]\n")
    changed = [path for path, text in zip(policies, before, strict=True) if path.read_text() != text]
    assert len(changed) == 1
    assert f"> {changed[0]})" in str(caught.value.hint)


def test_a_fix_cancelled_beforehand_changes_nothing(policies: tuple[Path, Path]) -> None:
    cancel, before = gpucr.Cancellation(), [path.read_text() for path in policies]
    cancel.cancel()
    with pytest.raises(gpucr.Interrupted, match=r"^cancelled; nothing else was changed$") as caught:
        gpucr.doctor(fix=True, cancel=cancel)
    assert caught.value.hint is None
    assert [path.read_text() for path in policies] == before


def test_without_fix_nothing_is_changed(policies: tuple[Path, Path]) -> None:
    before = [path.read_text() for path in policies]
    assert gpucr.doctor().repairs == ()
    assert [path.read_text() for path in policies] == before


def test_a_setting_that_cannot_be_written_is_reported(policies: tuple[Path, Path], tmp_path: Path) -> None:
    shared, _ = policies
    shared.unlink()
    shared.mkdir()
    (done,) = repairs.repair([SPOILT])
    assert (done.undo, done.problem) == (None, "Is a directory")


def test_each_thing_is_fixed_once(policies: tuple[Path, Path]) -> None:
    assert len(repairs.repair([SPOILT, SPOILT, BLOCKING])) == 1


def test_criu_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "4.2.1-forky/usr/sbin/criu"
    install = CriuInstall((str(program),), (4, 2, 1), "provided", program)
    monkeypatch.setattr(repairs, "provide_criu", lambda _say: install)
    (done,) = repairs.repair(
        [Finding("blocking", "none", "PATH", "no dump", "fetch", repair="fetch-criu", about="CRIU")]
    )
    assert (done.what, done.undo) == ("CRIU 4.2.1 was fetched", f"rm -r {tmp_path / '4.2.1-forky'}")


def test_criu_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_say: object) -> CriuInstall:
        raise CriuUnavailable("apt knows no mirror", hint="set one")

    monkeypatch.setattr(repairs, "provide_criu", refuse)
    (done,) = repairs.repair(
        [Finding("blocking", "none", "PATH", "no dump", "fetch", repair="fetch-criu", about="CRIU")]
    )
    assert (done.undo, done.problem) == (None, "apt knows no mirror; set one")


def test_a_fix_is_reported_with_its_undo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = (
        gpucr.Repair("huge-pages-shared", "x was deny and is never", "echo deny > x"),
        gpucr.Repair("fetch-criu", "CRIU was not fetched", None, "no mirror"),
    )
    monkeypatch.setattr(cli, "doctor", lambda *_, **__: DoctorReport((), done))
    cli.command.main(["--fix"], standalone_mode=False)
    assert capsys.readouterr().err.splitlines() == [
        "fixed: x was deny and is never",
        "undo:  echo deny > x",
        "not fixed: CRIU was not fetched: no mirror",
    ]


@pytest.mark.parametrize("options", [[], ["--problems"]])
def test_the_last_line_counts_the_verdicts(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Finding("ok", "it can", "libcuda", about="driver")
    monkeypatch.setattr(cli, "doctor", lambda *_, **__: DoctorReport((fine, SPOILT, fine)))
    printed = CliRunner().invoke(cli.command, options).stdout.splitlines()
    assert printed[-1] == "2 ok, 1 warning, 0 blocking, 0 unknown"
    assert [line.split()[0] for line in printed if line[:1] not in (" ", "2")] == [
        "VERDICT", *(["ok"] if not options else []), "warning", *(["ok"] if not options else []),
    ]  # fmt: skip


def test_quiet_prints_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "doctor", lambda *_, **__: DoctorReport((BLOCKING,)))
    done = CliRunner().invoke(cli.command, ["-q"])
    assert (done.output, type(done.exception)) == ("", Unsupported)
