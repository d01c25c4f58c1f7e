"""The drawings of the explanation: what gpucr does to a job, where its memory is, who waits for whom."""

from __future__ import annotations

from tests.docs.pictures.svg import Drawing


def states() -> str:
    """The ladder of a process."""
    drawing = Drawing("The four actions of the driver lead between three states", 190)
    drawing.text(20, 32, "The CUDA states of one process", bold=True, size=17)
    for x, name, meaning, kind in (
        (20, "running", "CUDA calls work", "run"),
        (275, "locked", "CUDA calls wait", "still"),
        (530, "checkpointed", "the GPU is free", "disk"),
    ):
        drawing.box(x, 56, 170, 60, name, meaning, kind=kind)
    for x, there, back in ((190, "lock", "unlock"), (445, "checkpoint", "restore")):
        drawing.line((x + 3, 76), (x + 82, 76), arrow=True)
        drawing.text(x + 42, 68, there, anchor="middle", size=14)
        drawing.line((x + 82, 98), (x + 3, 98), arrow=True)
        drawing.text(x + 42, 116, back, anchor="middle", size=14)
    drawing.text(
        20, 148, "suspend: lock and checkpoint every process of the job; resume: restore and unlock them", size=14
    )
    drawing.text(20, 172, "Every undo leads back to the state in which the process was found.", size=14)
    return drawing.svg()


def dump() -> str:
    """A dump over time, on the captured way."""
    drawing = Drawing(
        "A dump: the job stands still while the driver checkpoints and CRIU writes, and ends only after the commit", 366
    )
    drawing.text(20, 32, "A dump over time (captured staging)", bold=True, size=17)
    for y, name in ((84, "job"), (140, "driver"), (196, "gpucr"), (252, "CRIU")):
        drawing.text(20, y + 2, name, bold=True)
        drawing.line((84, y + 24), (700, y + 24), kind="grid", width=1)
    drawing.box(84, 64, 106, 34, "runs", kind="run")
    drawing.box(190, 64, 400, 34, "stands still", kind="still")
    drawing.box(590, 64, 110, 34, "is gone")
    drawing.box(190, 120, 56, 34, "lock", size=14)
    drawing.box(246, 120, 130, 34, "checkpoint", kind="host", size=14)
    drawing.box(104, 176, 86, 34, "allocate", size=14)
    drawing.box(276, 176, 260, 34, "save device memory, hashed", kind="disk", size=14)
    drawing.box(396, 232, 140, 34, "write the rest", kind="disk", size=14)
    drawing.line((562, 48), (562, 276), kind="stop", width=2.5)
    drawing.text(562, 294, "commit: the manifest is written, last", anchor="middle", size=14)
    drawing.text(
        20, 326, "Left of the red line a failure is undone. Right of it the snapshot is complete and durable.", size=13
    )
    drawing.text(
        20,
        348,
        "With --leave-running the job runs again after CRIU; the rest is saved, then comes the commit.",
        size=13,
    )
    return drawing.svg()


def device_memory() -> str:
    """A row for each way off the GPU, a column for each moment."""
    drawing = Drawing(
        "Where device memory is on three ways: with the driver alone it ends in CRIU's images, captured staging is a "
        "file in host memory, and interposed memory is read straight from the GPU",
        450,
    )
    drawing.text(20, 32, "Where device memory is", bold=True, size=17)
    for x, kind, place in ((330, "gpu", "GPU"), (430, "host", "host memory"), (590, "disk", "disk")):
        drawing.box(x, 18, 18, 18, kind=kind)
        drawing.text(x + 26, 32, place, size=14)
    columns = (132, 276, 420, 564)
    for x, moment in zip(columns, ("job runs", "suspended", "while CRIU dumps", "snapshot"), strict=True):
        drawing.text(x + 68, 68, moment, anchor="middle", size=14, bold=True)
    ways = (
        ("the driver's", "own way", (
            ("gpu", "device memory"), ("host", "private memory", "of the process"),
            ("host", "private memory", "of the process"), ("disk", "CRIU's images", "of the process"),
        ), "the driver copies, one thread; CRIU writes"),
        ("captured", "(root)", (
            ("gpu", "device memory"), ("host", "staging file", "in the process"),
            ("host", "staging file of", "gpucr and guard"), ("disk", "device/"),
        ), "the driver copies, one thread; gpucr writes meanwhile"),
        ("interposed", "(gpucr run)", (
            ("gpu", "blocks that", "can leave"), ("host", "a file that the", "process keeps"),
            ("gpu", "blocks held by", "gpucr and guard"), ("disk", "device/"),
        ), "gpucr copies from the GPU, many threads"),
    )  # fmt: skip
    for row, (name, more, cells, who) in enumerate(ways):
        y = 84 + 104 * row
        drawing.text(20, y + 27, name, bold=True)
        drawing.text(20, y + 46, more, kind="soft", size=14)
        for x, (kind, *words) in zip(columns, cells, strict=True):
            drawing.box(x, y, 136, 56, *words, kind=kind, size=14)
        drawing.text(132, y + 76, who, kind="soft", size=14)
    drawing.text(
        20, 408, "Under the interposer a dump skips “suspended”. A suspended job can be dumped on every way.", size=13
    )
    drawing.text(
        20,
        430,
        "A restore goes from right to left. Under the interposer contexts still take the driver's way.",
        size=13,
    )
    return drawing.svg()


def interposer() -> str:
    """Who is in the process, and by which way its memory leaves."""
    drawing = Drawing(
        "Under the interposer CUDA calls pass a gate; at a freeze an agent hands blocks of device memory to gpucr, "
        "which copies them straight from the GPU",
        496,
    )
    drawing.text(20, 32, "What the interposer does", bold=True, size=17)
    drawing.box(20, 50, 320, 240, kind="hole")
    drawing.text(34, 74, "a process of the job", kind="soft", size=14)
    drawing.box(40, 86, 116, 44, "program")
    drawing.box(40, 158, 116, 44, "gate", kind="still")
    drawing.box(40, 230, 116, 44, "libcuda")
    drawing.box(204, 86, 116, 44, "agent", "(one thread)", kind="run", size=14)
    drawing.line((98, 130), (98, 156), arrow=True)
    drawing.text(108, 148, "calls", size=13)
    drawing.line((98, 202), (98, 228), arrow=True)
    drawing.line((240, 130), (240, 180), (158, 180), arrow=True)
    drawing.text(170, 172, "1  closes", size=13)
    drawing.line((284, 130), (284, 252), (158, 252), arrow=True)
    drawing.text(170, 244, "exports, drops", size=13)
    drawing.box(500, 50, 200, 240, kind="hole")
    drawing.text(514, 74, "gpucr", kind="soft", size=14)
    drawing.box(520, 86, 160, 44, "operation", "and its guard", size=14)
    drawing.box(520, 230, 160, 44, "vault: threads and", "a ring of 384 MiB", kind="host", size=14)
    drawing.line((320, 108), (518, 108), arrow=True)
    drawing.text(420, 98, "2  descriptors", anchor="middle", size=14)
    drawing.text(420, 128, "over a socket", anchor="middle", size=13, kind="soft")
    drawing.line((600, 130), (600, 228), arrow=True)
    drawing.line((98, 274), (98, 334), arrow=True)
    drawing.text(108, 316, "3  the driver's checkpoint", size=13)
    drawing.box(20, 336, 430, 44, "GPU: device memory in blocks of at most 1 GiB", kind="gpu", size=14)
    drawing.line((450, 358), (550, 358), (550, 276), arrow=True)
    drawing.text(474, 348, "4  copy", size=14)
    drawing.box(580, 336, 120, 44, "snapshot, or", "host memory", kind="disk", size=13)
    drawing.line((640, 274), (640, 334), arrow=True)
    drawing.notes(
        410,
        "1  The gate closes: new calls wait, those inside finish, and the driver locks the process.",
        "2  The agent exports its blocks as descriptors and drops them; they stay on the GPU.",
        "3  The driver checkpoints what is left: contexts and small allocations.",
        "4  Meanwhile, or later, the vault copies the blocks. On the way back the gate opens last.",
    )
    return drawing.svg()


def gang() -> str:
    """Holding the leader: three ranks; one is a collective ahead."""
    drawing = Drawing(
        "How a gang is locked: the rank that is ahead is held by its pending lock while the others run for a "
        "millisecond and catch up",
        366,
    )
    drawing.text(20, 32, "How a gang is frozen: hold the leader", bold=True, size=17)
    moments = ((96, "1  lock all"), (288, "2  release, 1 ms"), (430, "3  lock again"), (572, "4  all locked"))
    for x, name in moments:
        drawing.text(x, 66, name, size=14, bold=True)
        if x > 96:
            drawing.line((x - 8, 54), (x - 8, 250), kind="grid", width=1)
    lanes = (
        ("rank 0", "at step 7", ((96, 176, "locked: nothing pending", "still"), (288, 126, "runs: step 8", "run"))),
        ("rank 1", "at step 7", ((96, 176, "locked: nothing pending", "still"), (288, 126, "runs: step 8", "run"))),
        ("rank 2", "at step 8", ((96, 318, "lock pending: step 8 waits for others", "host"),)),
    )
    for row, (name, step, boxes) in enumerate(lanes):
        y = 82 + 58 * row
        drawing.text(20, y + 18, name, bold=True)
        drawing.text(20, y + 36, step, kind="soft", size=13)
        for x, width, words, kind in boxes:
            drawing.box(x, y, width, 42, words, kind=kind, size=13)
        drawing.box(430, y, 126, 42, "locked, step 8", kind="still", size=13)
        drawing.box(572, y, 128, 42, "checkpoint", kind="disk", size=13)
    drawing.notes(
        280,
        "A locked rank submits nothing, so a collective that its peers have submitted never ends.",
        "A pending lock shows who is ahead. It holds that rank while the others catch up.",
        "2 and 3 are repeated until all ranks are locked. At the time-out all run again.",
        "Then threads are held, device memory leaves every rank at once, and the ranks are stopped.",
    )
    return drawing.svg()


DRAWINGS = {
    "states": states,
    "dump": dump,
    "device-memory": device_memory,
    "interposer": interposer,
    "gang": gang,
}
"""Name of the file in docs/pictures → what draws it."""
