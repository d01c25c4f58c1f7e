"""The processes in CRIU's images: the pids that a restore needs, and whose session it joins."""

from __future__ import annotations

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, OpenImage

TREE_IMAGE = "pstree.img"
TREE_MAGIC = 0x50273030  # PSTREE_MAGIC of CRIU's image format
MAX_TREE_BYTES = 16 << 20


def pids_in(open_image: OpenImage) -> tuple[int, ...]:
    """The pids that CRIU creates to restore the tree, as in the images: more than those of the running processes.

    They include zombies that their parents had not reaped, and the pid of a process group or session whose first
    process has ended: CRIU makes a temporary process for it. A root in another process's session (CRIU's --shell-job)
    gets CRIU's own session, so its old session and group are not needed. Raises OSError, and ImageError if the image is
    damaged.
    """
    tree = _tree(open_image)
    root = tree[0]
    joined = set() if root.sid == root.pid else {root.sid, root.pgid}
    wanted = {number for each in tree for number in (each.pgid, each.sid)} - joined
    wanted |= {pid for each in tree for pid in (each.pid, *each.threads)}
    return tuple(sorted(wanted - {0}))  # 0: from outside the job's pid namespace


def joins_a_session(open_image: OpenImage) -> bool:
    """Whether the leader of the tree's session is outside it: it joins CRIU's (--shell-job). Raises as above."""
    tree = _tree(open_image)
    return tree[0].sid not in {each.pid for each in tree}


def _tree(open_image: OpenImage) -> tuple[images_pb2.TreeEntry, ...]:
    with open_image(TREE_IMAGE) as stream:
        image = ImageReader(stream, TREE_MAGIC, "processes", max_bytes=MAX_TREE_BYTES)
        tree = tuple(image.entries(images_pb2.TreeEntry))
    if not tree:
        raise ImageError("it has no process")
    return tree
