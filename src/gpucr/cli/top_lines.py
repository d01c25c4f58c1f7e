"""The screen of `gpucr top` as typed lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from gpucr.cli.columns import shortened, wrapped
from gpucr.cli.job_table import command_of, gpu_numbers, job_lines
from gpucr.cli.output import printable
from gpucr.cli.progress import how_far
from gpucr.cli.top_state import Question, TopState
from gpucr.diagnosis.preflight import Finding
from gpucr.model import Gpu, GpuActivity
from gpucr.quantities import counted, format_bytes

Style = Literal["plain", "title", "heading", "selected", "error", "question", "keys"]

_MOST_GPU_LINES = 8
_FEWEST_ROWS = 3

_KEYS = (
    "↑↓ select   s suspend   r resume   c can it be checkpointed?   q quit",
    "↑↓ select  s suspend  r resume  c check  q quit",
    "s suspend  r resume  c check  q quit",
)
"""The longest that fits is used."""
_KEYS_WHILE_RUNNING = ("x cancel and undo",)


class Line(Struct, frozen=True):
    """One line of the screen."""

    text: str
    style: Style = "plain"


def screen(state: TopState, width: int, height: int) -> list[Line]:
    """At most ``height`` lines of at most ``width`` cells. The selected job is always included."""
    processes = sum(len(job.processes) for job in state.jobs)
    head = [Line(f"gpucr top: {counted(len(state.jobs), 'job')}, {counted(processes, 'process')} with CUDA", "title")]
    head += [Line(_gpu_line(gpu, state.activity.get(gpu.uuid))) for gpu in state.gpus[:_MOST_GPU_LINES]]
    pane = [Line(text, line.style) for line in _pane(state) for text in _wrapped(line.text, width)]
    rows = height - len(head) - len(pane) - 2
    if rows < _FEWEST_ROWS:  # a small terminal: questions come before messages
        head = head[:1]
        rows = max(height - len(head) - len(pane) - 2, 1)
    lines = [*head, *_table(state, width, rows)]
    foot = [*pane[: max(height - len(lines) - 1, 0)], *([_keys(state, width)] if height > len(lines) else [])]
    lines += [Line("")] * (height - len(lines) - len(foot))
    return [Line(shortened(line.text, width), line.style) for line in (*lines, *foot)][:height]


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Sentences are never cut: they wrap to the next line, indented."""
    indent = len(text) - len(text.lstrip())
    return wrapped(text.lstrip(), width, first=" " * indent, indent=indent + 2)


def _table(state: TopState, width: int, rows: int) -> Iterator[Line]:
    if not state.jobs:
        yield Line("no process uses CUDA")
        return
    heading, *jobs = job_lines(state.jobs, state.gpus, width, state.kept)
    yield Line(heading.ljust(width), "heading")
    top = max(min(state.selected - rows // 2, len(jobs) - rows), 0)
    for number, text in enumerate(jobs[top : top + rows], top):
        yield Line(text.ljust(width), "selected") if number == state.selected else Line(text)


def _gpu_line(gpu: Gpu, activity: GpuActivity | None) -> str:
    used, total = gpu.memory_total_bytes - gpu.memory_free_bytes, gpu.memory_total_bytes
    parts = [f"GPU {gpu.index} {gpu.name}: {format_bytes(used)} of {format_bytes(total)}"]
    if activity is None:
        return f"{parts[0]} in use"
    if activity.utilization_percent is not None:
        parts.append(f"{activity.utilization_percent} % busy")
    if activity.temperature_c is not None:
        parts.append(f"{activity.temperature_c} °C")
    return ", ".join(parts)


def _pane(state: TopState) -> list[Line]:
    """The text below the table: the operation, the question, the last event, or details of the selected job."""
    if state.running is not None:
        return _running_lines(state)
    if state.question is not None:
        return [*_question_lines(state, state.question), *_finding_lines(state)]
    notice = [Line(printable(line), "error" if state.notice.is_error else "plain") for line in state.notice.lines]
    return [*notice, *_finding_lines(state)] or [Line(f"{job.pid} {command_of(job)}") for job in (state.job,) if job]


def _running_lines(state: TopState) -> list[Line]:
    running, progress = state.running, state.progress
    doing = f"{running.action} {running.root.pid}" if running is not None else ""
    if progress is None:
        return [Line(f"{doing}: begins", "question")]
    if progress.event in ("undo", "signal-ignored"):
        return [Line(f"{doing}: undoing {progress.phase}", "question")]
    far = f", {how_far(progress)}" if progress.total_bytes else ""
    wait = "; cancelled, it is undone as soon as this can be left" if state.is_cancelled else ""
    return [Line(printable(f"{doing}: {progress.description}{far}{wait}"), "question")]


def _question_lines(state: TopState, question: Question) -> list[Line]:
    job = question.job
    count = counted(len(job.processes), "process")
    name = f"{job.name} ({job.pid})" if job.name is not None else str(job.pid)
    if question.action == "suspend":
        on = gpu_numbers(job.device_bytes, state.gpus)
        what = f"{format_bytes(sum(job.device_bytes.values()))} on GPU {on} go to host memory"
    else:
        what = "device memory goes back to its GPUs"
    lines = [Line(f"{question.action} job {name}, {count}: {what}", "question")]
    answers = "y yes   n no"
    if question.parent is not None:
        others = counted(question.siblings, "other job")
        pid = question.parent.pid
        lines.append(Line(f"its parent {pid} started {others} too: p {question.action}s all below {pid}", "question"))
        answers += f"   p all below {pid}"
    return [*lines, Line(answers, "question")]


def _finding_lines(state: TopState) -> list[Line]:
    if state.findings is None:
        return []
    pid, findings = state.findings
    if findings is None:
        return [Line(f"preflight looks at job {pid}")]
    if not findings:
        return [Line(f"nothing stands in the way of a checkpoint of job {pid}")]
    return [line for finding in findings for line in _finding(finding)]


def _finding(finding: Finding) -> Sequence[Line]:
    style: Style = "error" if finding.severity == "blocking" else "plain"
    text = f"{finding.severity}: {finding.what}: {finding.consequence}"
    return Line(printable(text), style), Line(printable(f"  {finding.remedy}"), style)


def _keys(state: TopState, width: int) -> Line:
    texts = _KEYS_WHILE_RUNNING if state.running is not None else _KEYS
    return Line(next((text for text in texts if len(text) <= width), texts[-1]), "keys")
