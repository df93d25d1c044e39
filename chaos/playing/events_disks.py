"""Disks of nodes' events, which faults spoil: a link to a file on such a disk is where that of the events would be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from chaos.faults.events import EventsFull, EventsGone, EventsHang, OfEvents
from chaos.faults.fault import Fault
from chaos.machine.small_disk import SmallDisk
from chaos.machine.spoilt_file import SpoiltFile


class EventsDisks:
    """What nodes' events are written to, as far as faults need disks for them. disks, files: by node.

    folder: of all nodes' events; what is mounted is beside it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.disks: dict[str, SmallDisk] = {}
        self.files: dict[str, SpoiltFile] = {}

    def lay(self, faults: Sequence[Fault], nodes: Iterable[str], stack: ExitStack) -> None:
        """Lay the disks that `faults` need for these nodes, until `stack` is closed; OSError where one cannot be."""
        if any(isinstance(fault, OfEvents) for fault in faults):
            for name in nodes:
                self._lay(faults, name, stack)
            stack.callback(self._keep)

    def _lay(self, faults: Sequence[Fault], name: str, stack: ExitStack) -> None:
        folder = self._folder.parent / "disks" / name
        if any(isinstance(fault, EventsFull) for fault in faults):
            self.disks[name] = stack.enter_context(SmallDisk(folder))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-0.jsonl"
        path.touch()
        if any(isinstance(fault, EventsHang | EventsGone) for fault in faults):
            file = stack.enter_context(SpoiltFile(self._folder.parent / "files" / name, path))
            self.files[name], path = file, file.path
        (self._folder / path.name).symlink_to(path)

    def _keep(self) -> None:
        """Put what nodes wrote to such disks where the events of others are, before the disks are taken away."""
        for path in self._folder.glob("*.jsonl"):
            if path.is_symlink():
                unfinished = path.with_suffix(".part")
                unfinished.write_bytes(path.read_bytes())
                unfinished.replace(path)
