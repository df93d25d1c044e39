"""A file system of which some calls are never answered, as a network's whose server is gone.

with HungFiles(folder) as files:
    open(files.data).read()  # waits in state D; SIGKILL ends it
    os.stat(files.name)      # waits for ever: once it was sent a signal nothing ends it but `release`
"""

from __future__ import annotations

from pathlib import Path

from chaos.machine.fuse import (
    NOT_FOUND,
    UNKNOWN,
    Answer,
    Operation,
    Request,
    ServedFiles,
    attributes,
    entry,
    opened,
)

_DATA = 2
_SIZE = 1 << 20
_FOR = 3600
"""Seconds for which the kernel remembers what it was told."""


class HungFiles(ServedFiles):
    """The file system at `folder`, which is made. data: a file whose bytes never come. name: one that is never found.

    unanswered: requests that were heard and have no answer. Until it is heard, SIGKILL takes a request back.

    OSError says why it cannot be mounted.
    """

    SOURCE = "hung"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.data, self.name = folder / "data", folder / "never"
        self.unanswered = 0

    def answered(self, request: Request) -> Answer | None:
        """Return what is said of the files themselves; never what is in one, nor whether the other is there."""
        match request.operation:
            case Operation.LOOKUP if request.name == b"data":
                return entry(_DATA, _SIZE, valid=_FOR)
            case Operation.LOOKUP if request.name != b"never":
                return NOT_FOUND
            case Operation.GETATTR:
                return attributes(request.node, _SIZE, valid=_FOR)
            case Operation.OPEN:
                return opened()
            case Operation.READ | Operation.LOOKUP:
                self.unanswered += 1
                return None
            case _:
                return UNKNOWN
