"""Which pids CRIU's images want back."""

from __future__ import annotations

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, OpenImage

TREE_IMAGE = "pstree.img"
TREE_MAGIC = 0x50273030  # PSTREE_MAGIC of CRIU's image format
MAX_TREE_BYTES = 16 << 20


def pids_in(open_image: OpenImage) -> tuple[int, ...]:
    """The pids that CRIU makes to restore the tree, as in the images: more than those of the processes that ran.

    There are zombies that their parents had not collected; and a process group or session whose first process has ended
    lives on under its pid, for which CRIU makes a process that ends again. A root that is in another process's session
    (CRIU's --shell-job) is in CRIU's own after a restore, so that the one that it had is not needed, nor its group.
    Raises OSError, and ImageError where the image is damaged.
    """
    with open_image(TREE_IMAGE) as stream:
        image = ImageReader(stream, TREE_MAGIC, "processes", max_bytes=MAX_TREE_BYTES)
        tree = tuple(image.entries(images_pb2.TreeEntry))
    if not tree:
        raise ImageError("it has no process")
    root = tree[0]
    joined = set() if root.sid == root.pid else {root.sid, root.pgid}
    wanted = {number for each in tree for number in (each.pgid, each.sid)} - joined
    wanted |= {pid for each in tree for pid in (each.pid, *each.threads)}
    return tuple(sorted(wanted - {0}))  # 0: from outside the job's pid namespace
