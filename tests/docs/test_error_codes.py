"""Each error and each situation that users must tell apart has a code, each code a page, and the commands show both."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr import Secret, init_store
from gpucr.checkups import catalogue
from gpucr.cli import explain, failures, reports
from gpucr.cli.output import JsonWanted
from gpucr.criu.diagnosis import KNOWN_FAILURES, diagnose
from gpucr.diagnosis.preflight.findings import Finding, require_no_blocking
from gpucr.errors import CriuError, GpucrError, InvalidRequest, SnapshotError, Unsupported
from gpucr.operations.plan import Plan
from tests.command import run
from tests.docs import error_codes, support
from tests.docs.pages import SOURCES, error_classes

_CODE = re.compile(r"GPUCR(?:-[A-Z0-9]+)+")
PAGES = explain.pages()


def _calls() -> Iterator[tuple[Path, ast.Call]]:
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield file, node


def _given_codes() -> set[str]:
    """The codes that raise sites and findings give."""
    given = [keyword.value for _, call in _calls() for keyword in call.keywords if keyword.arg == "code"]
    return {str(value.value) for value in given if isinstance(value, ast.Constant)} | _named_codes()


def _named_codes() -> set[str]:
    """Those of class attributes: ``NONE_CODE = "GPUCR-…"``."""
    return {
        str(node.value.value)
        for file in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if _CODE.fullmatch(str(node.value.value))
        if any(isinstance(target, ast.Name) and target.id.endswith("_CODE") for target in node.targets)
    }


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [error.__dict__.get("code") for error in error_classes()]
    assert None not in codes
    assert len(codes) == len(set(codes))


def test_every_blocking_finding_has_a_code_of_its_own() -> None:
    """Except those of the doctor alone, which refuse nothing."""
    known = [fact for module in (*support.MODULES, catalogue) for fact in support.facts(module).values()]
    assert len(known) > 150
    assert [fact.what for fact in known if fact.severity == "blocking" and not (fact.code or fact.about)] == []


def test_findings_are_made_of_facts() -> None:
    """Of other things are what is fine, what a canary showed, and former errors, which the doctor and `ps` show."""
    makers = {
        file.name
        for file, call in _calls()
        if "Finding" in (getattr(call.func, "id", ""), getattr(call.func, "attr", "")) and call.args
    }
    assert makers == {"checkup.py", "fact.py", "gpu_jobs.py", "job.py", "measured.py"}


def test_every_code_has_a_section_and_every_section_a_code() -> None:
    codes = {error.code for error in error_classes()} | _given_codes() | {each.code for each in KNOWN_FAILURES}
    assert codes == set(PAGES)
    assert all(_CODE.fullmatch(code) for code in codes)


def test_codes_are_in_alphabetical_order() -> None:
    text = error_codes.PAGE.read_text()
    assert error_codes.in_order(text) == text, "run python -m tests.docs"
    assert list(PAGES) == sorted(PAGES)
    assert (
        error_codes.in_order("a\n\n## GPUCR-B\n\nb\n\n## GPUCR-A\n\na\n") == "a\n\n## GPUCR-A\n\na\n\n## GPUCR-B\n\nb\n"
    )


@pytest.mark.parametrize("code", PAGES)
def test_a_section_says_what_why_and_what_to_do(code: str) -> None:
    what, *rest = PAGES[code].split("\n\n")
    assert what.endswith(".")
    assert [paragraph.partition(" ")[0] for paragraph in rest] == ["**Why.**", "**Do.**"]
    assert "](" not in PAGES[code]


def test_a_refusal_has_the_code_of_its_blocking_finding() -> None:
    finding = Finding("blocking", "what", "evidence", "consequence", "remedy", code="GPUCR-MIG")
    with pytest.raises(Unsupported) as caught:
        require_no_blocking([Finding("warning", "w", "e", "c", "r"), finding])
    assert caught.value.code == "GPUCR-MIG"


def test_a_dry_run_shows_the_codes_of_blocking_findings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocking = Finding("blocking", "what", "evidence", "consequence", "remedy", code="GPUCR-MIG")
    findings = (blocking, Finding("warning", "w", "e", "c", "r"))
    reports._print_steps(Plan(7, ("step",), findings), quiet=False)
    assert capsys.readouterr().err.splitlines() == [
        "blocking: what (evidence): consequence",
        "hint:  remedy",
        "code:  GPUCR-MIG",
        "warning: w (e): c",
        "hint:  r",
    ]


def test_a_failure_of_criu_has_the_code_of_its_reason() -> None:
    known = diagnose("(00.01) Error (criu/files.c:1): Can't dump file 5 of that type [100644]")
    assert known.code == "GPUCR-UNSUPPORTED-FILE"
    unknown = diagnose("(00.01) Error (criu/x.c:1): something new")
    assert CriuError("x", phase="dump", code=unknown.code).code == "GPUCR-CRIU"


def test_the_reason_adds_to_the_message() -> None:
    def failure(cause: BaseException) -> GpucrError:
        error = SnapshotError("the folder /a cannot be made", path="/a")
        error.__cause__ = cause
        return error

    assert failure(PermissionError(13, "Permission denied", "/a")).why == "Permission denied"
    assert failure(InvalidRequest("a bad value\nand more")).why == "a bad value"
    assert failure(OSError("cannot be made")).why is None, "the message has said it"
    assert failure(FileNotFoundError(2, "No such file or directory")).why is None
    beyond = KeyError("a")
    beyond.__cause__ = OSError(5, "Input/output error")
    assert failure(beyond).why == "Input/output error"
    assert SnapshotError("x", path="/a").why is None
    assert CriuError("x", phase="dump", reason="its own line").why == "its own line"


def test_an_error_on_stderr_and_in_json() -> None:
    done = run("suspend", "--json", 2**22 + 1)
    assert done.returncode == 2
    said = dict(line.split(":", 1) for line in done.stderr.splitlines())
    assert {name: text.strip() for name, text in said.items()} == {
        "error": f"there is no process {2**22 + 1}",
        "hint": "`gpucr ps` lists the CUDA processes",
        "code": "GPUCR-NO-PROCESS",
    }
    assert json.loads(done.stdout) == {
        "schema": "gpucr.error",
        "schema_version": 1,
        "code": "GPUCR-NO-PROCESS",
        "exit_code": 2,
        "message": f"there is no process {2**22 + 1}",
        "why": None,
        "hint": "`gpucr ps` lists the CUDA processes",
        "data": {"pid": 2**22 + 1},
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("ls", "{place}"), "GPUCR-NO-STORE"),
        (("verify", "{place}#a"), "GPUCR-NO-STORE"),
        (("store", "init", "{place}"), "GPUCR-STORE-EXISTS"),
        (("store", "init", "{place}/encrypted"), "GPUCR-STORE-EXISTS"),
        (("prune", "{place}/encrypted"), "GPUCR-WRONG-KEY"),
        (("rm", "{place}/plain"), "GPUCR-BAD-REQUEST"),
        (("ls", "{place}/plain", "--key-file", "{place}/key"), "GPUCR-NOT-ENCRYPTED"),
        (("copy", "{place}/plain", "{place}/damaged"), "GPUCR-STORE-DAMAGED"),
        (("dump", "1", "--to", "{place}/plain#a", "--encrypt"), "GPUCR-NOT-ENCRYPTED"),
    ],
)
def test_store_errors_are_shown_like_any_other(tmp_path: Path, arguments: tuple[str, ...], code: str) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    init_store(tmp_path / "plain")
    init_store(tmp_path / "encrypted", key=Secret.key_file(bytes(32)))
    init_store(tmp_path / "damaged")
    (tmp_path / "damaged" / "gpucr-store.json").write_bytes(b"{")
    done = run(*(text.format(place=tmp_path) for text in arguments), "--json")
    printed = json.loads(done.stdout)
    assert (printed["schema"], printed["code"], printed["exit_code"]) == ("gpucr.error", code, done.returncode)
    assert done.stderr.startswith(f"error: {printed['message']}\n")
    assert done.stderr.endswith(f"code:  {code}\n")


@pytest.mark.parametrize("arguments", [("suspend", "--json"), ("suspend", "--no-such-option", "--json", "1")])
def test_a_bad_command_line_in_json(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    printed = json.loads(done.stdout)
    assert printed["code"] == "GPUCR-BAD-REQUEST"
    assert printed["message"] in done.stderr
    assert done.stderr.endswith("code:  GPUCR-BAD-REQUEST\n")


def test_without_json_stdout_is_empty() -> None:
    assert run("suspend", 2**22 + 1).stdout == ""


@pytest.mark.parametrize(("is_printed", "objects"), [(False, 1), (True, 0)])
def test_an_error_adds_an_object_only_if_none_was_printed(
    is_printed: bool, objects: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failures.show(InvalidRequest("x"), JsonWanted(is_wanted=True, is_printed=is_printed))
    assert capsys.readouterr().out.count('"schema"') == objects


def test_a_command_that_prints_and_then_fails_prints_one_object(tmp_path: Path) -> None:
    broken = tmp_path / "criu"
    broken.write_text("#!/bin/sh\ncase $1 in --version|-V) echo Version: 4.2.1;; *) echo broken; exit 1;; esac\n")
    broken.chmod(0o755)
    done = run("criu", "--no-fetch", "--json", env={"GPUCR_CRIU": str(broken)})
    assert done.returncode != 0
    assert json.loads(done.stdout)["schema"] == "gpucr.criu"
    assert "code:  GPUCR-" in done.stderr


@pytest.mark.parametrize("written", ["GPUCR-LOCK-TIMEOUT", "gpucr-lock-timeout", "lock-timeout"])
def test_explain(written: str) -> None:
    done = run("explain", written)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"GPUCR-LOCK-TIMEOUT\n\n{PAGES['GPUCR-LOCK-TIMEOUT']}\n"


def test_explain_without_a_code_lists_all() -> None:
    listed = run("explain").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(PAGES)
    assert "GPU work was pending for too long" in "\n".join(listed)


def test_explain_of_an_unknown_code() -> None:
    done = run("explain", "lok-timeout")
    assert done.returncode == 2
    assert "did you mean GPUCR-LOCK-TIMEOUT" in done.stderr
