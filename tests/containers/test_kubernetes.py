"""The manifests of docs/how-to/kubernetes fit the published schemas, and their scripts do what they say.

No cluster runs them: what a kubelet makes of them is not tested.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.containers.kubernetes_schema import MANIFESTS, SCHEMA, Schema, documents
from tests.counter import DEADLINE_S, wait_until

PUBLISHED = Schema(json.loads(SCHEMA.read_text())["$defs"])
FILES = sorted(MANIFESTS.glob("*.yaml"))
OBJECTS = [(f"{path.name}-{each['kind']}", each) for path in FILES for each in documents(path)]


def problems(document: dict[str, Any]) -> list[str]:
    return list(PUBLISHED.problems(document, PUBLISHED.root(document), document["kind"]))


def the(kind: str, file: str) -> dict[str, Any]:
    """The object of this kind in a file, which may be changed."""
    (found,) = [each for each in documents(MANIFESTS / file) if each["kind"] == kind]
    return copy.deepcopy(found)


@pytest.mark.parametrize("document", [each for _, each in OBJECTS], ids=[name for name, _ in OBJECTS])
def test_every_object_matches_its_schema(document: dict[str, Any]) -> None:
    assert problems(document) == []


def spec(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: spec(d).update(hostPid=True), "hostPid: there is no such member"),
        (lambda d: spec(d).update(hostPID="yes"), "hostPID: 'yes' is not boolean"),
        (lambda d: spec(d)["containers"][0].pop("name"), r"containers\[0\]: there is no name"),
        (lambda d: spec(d)["containers"][0].update(command="sh"), "command: 'sh' is not array"),
        (lambda d: spec(d)["containers"][0]["env"][0].update(value=1), "value: 1 is not string"),
        (lambda d: d["spec"].pop("selector"), "spec: there is no selector"),
        (lambda d: d["metadata"].update(labels={"a": 1}), "labels"),
        (lambda d: d["spec"]["updateStrategy"]["rollingUpdate"].update(maxUnavailable=[]), "maxUnavailable"),
    ],
)
def test_a_mistake_is_detected(change: Callable[[dict[str, Any]], object], problem: str) -> None:
    document = the("DaemonSet", "node.yaml")
    change(document)
    assert re.search(problem, "\n".join(problems(document)))


def test_a_kind_of_another_version_is_detected() -> None:
    with pytest.raises(LookupError, match="no schema of DaemonSet in apps/v1beta1"):
        problems({**the("DaemonSet", "node.yaml"), "apiVersion": "apps/v1beta1"})


def test_matching_names_are_equal() -> None:
    daemon = the("DaemonSet", "node.yaml")
    namespace = the("Namespace", "node.yaml")["metadata"]["name"]
    assert daemon["spec"]["selector"]["matchLabels"].items() <= daemon["spec"]["template"]["metadata"]["labels"].items()
    (container,) = spec(daemon)["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec(daemon)["volumes"]}
    account, role = the("ServiceAccount", "checkpoint.yaml")["metadata"], the("ClusterRole", "checkpoint.yaml")
    binding, job = the("ClusterRoleBinding", "checkpoint.yaml"), the("Job", "checkpoint.yaml")
    (subject,) = binding["subjects"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert spec(job)["serviceAccountName"] == account["name"]
    assert {daemon["metadata"]["namespace"], account["namespace"], job["metadata"]["namespace"]} == {namespace}
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes/checkpoint"], "verbs": ["create"]}]
    image = (MANIFESTS / "Dockerfile").read_text()
    assert container["image"] in image
    assert container["command"] == ["/opt/gpucr-node/install"]
    assert "/opt/gpucr-node/install" in image


def test_the_job_calls_the_kubelet_without_revealing_its_token(tmp_path: Path) -> None:
    (container,) = spec(the("Job", "checkpoint.yaml"))["containers"]
    (account := tmp_path / "account").mkdir()
    (account / "token").write_text("a-secret-token")
    called, read = tmp_path / "called", tmp_path / "read"
    program(tmp_path / "curl", f'printf "%s\\n" "$@" > {called}; cat > {read}; echo \'{{"items":["/x.tar"]}}\'')
    (script,) = container["args"]
    script = script.replace("/var/run/secrets/kubernetes.io/serviceaccount", str(account))
    done = subprocess.run(
        [*container["command"], script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODE": "192.0.2.7", "TARGET": "default/train/main"},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == '{"items":["/x.tar"]}\n'
    words = called.read_text().splitlines()
    assert "https://192.0.2.7:10250/checkpoint/default/train/main?timeout=600" in words
    assert words[words.index("--request") + 1] == "POST"
    assert "a-secret-token" not in called.read_text(), "everybody on a machine sees the arguments of its processes"
    assert read.read_text() == 'header = "Authorization: Bearer a-secret-token"\n'


@pytest.mark.parametrize("group", ["", "research"])
def test_the_installer_copies_gpucr_sets_it_up_and_waits(tmp_path: Path, group: str) -> None:
    """With folders instead of the image and the node, and a program that writes down what would be run on the node."""
    image, opt, called = tmp_path / "image", tmp_path / "opt", tmp_path / "called"
    image.mkdir()
    (image / "gpucr").write_text("new")
    (opt / "gpucr-node").mkdir(parents=True)
    (opt / "gpucr-node" / "left-by-an-older-one").touch()
    program(tmp_path / "nsenter", f'echo "$@" >> {called}')
    script = (MANIFESTS / "install").read_text().replace("/node/opt", str(opt))
    script = script.replace("cp -a /opt/gpucr-node", f"cp -a {image}")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUCR_RUNTIME": "crun", "GPUCR_HELPER_GROUP": group}
    started = subprocess.Popen(["sh", "-c", script], env=environment, start_new_session=True)
    try:
        wait_until(lambda: called.exists() and " doctor" in called.read_text(), "the installer")
        assert [each.name for each in (opt / "gpucr-node").iterdir()] == ["gpucr"]
        assert [each.name for each in opt.iterdir()] == ["gpucr-node"]
        helper = [f"helper install --group {group}"] if group else []
        on_node = "--target 1 --mount -- /opt/gpucr-node/gpucr"
        expected = [f"{on_node} {each}" for each in ("criu", "hook install --runtime crun", *helper, "doctor")]
        assert called.read_text().splitlines() == expected
        assert started.poll() is None, "the pod stays, so that its probe can look"
        started.send_signal(signal.SIGTERM)
        assert started.wait(DEADLINE_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        subprocess.run(["sh", "-nc", script], check=True, timeout=DEADLINE_S)


def test_its_commands_exist_in_gpucr() -> None:
    for words in (("hook", "install"), ("hook", "status"), ("criu",), ("doctor",)):
        assert run(*words, "--help").returncode == 0
    said = run("helper", "install", "--help").stdout + run("hook", "install", "--help").stdout
    assert all(option in said for option in ("--group", "--runtime"))
    assert (MANIFESTS / "install").stat().st_mode & stat.S_IXUSR


def program(path: Path, body: str) -> None:
    """A shell program of this name."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
