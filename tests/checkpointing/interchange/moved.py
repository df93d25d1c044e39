"""Run by itself: one import or export, and the memory it took beyond what was there before."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from checkpointing import open_checkpoint, open_store
from checkpointing.interchange import contents, export_checkpoint, import_checkpoint, transfer


def peak() -> int:
    """Return the most memory this process has ever held, in bytes; files that are mapped count."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def main() -> None:
    what, kind, url, path = sys.argv[1:]
    store = open_store(url)
    # The amounts held at once are scaled down, so that a small state is many times larger.
    transfer.PART_BYTES = contents.BATCH_BYTES = 16 << 20
    contents.SLAB_TILES = 2
    if what == "export":
        checkpoint = open_checkpoint(store)
        # Torch's lazy parts are loaded before anything is measured.
        export_checkpoint(kind, checkpoint, Path(path).with_name(f"small.{kind}"), prefix="small.")
        before = peak()
        export_checkpoint(kind, checkpoint, path)
    else:
        before = peak()
        import_checkpoint(kind, path, store)
    print(peak() - before)


if __name__ == "__main__":
    main()
