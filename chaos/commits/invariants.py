"""Invariants that hold after every store operation, whatever the actors believe.

Stored bytes are compared with what they should be (`contents`), read by the production reader through a view of the
that is nobody's turn. A checkpoint is looked at when it becomes committed, and again whenever one of the objects it
was read from changes: nothing else can change what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos.commits.contents import SPECS, contents, facts
from chaos.commits.model import Change, Held, ModelStore, Request
from checkpointing import Checkpoint, Ref, open_checkpoint, resolve
from checkpointing.errors import CheckpointError
from checkpointing.format import names
from checkpointing.format.announcement import decode_announcement
from checkpointing.format.refs import decode_ref
from checkpointing.stores.protocol import Data, Entry, Versioned

_ONCE = ("packs/", "saves/", names.CHECKPOINTS)


@dataclass(slots=True)
class View:
    """The store as it is, read by the checker; it knows the names it was asked for."""

    store: ModelStore
    seen: set[str] = field(default_factory=set)
    url: str = "model"

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self.seen.add(name)
        return self.store.held(name).data[start:stop]

    def read(self, name: str) -> Versioned | None:
        self.seen.add(name)
        stored = self.store.objects.get(name)
        return Versioned(data=stored.data, token=stored.token) if stored else None

    def size(self, name: str) -> int:
        self.seen.add(name)
        return len(self.store.held(name).data)

    def entries(self, prefix: str) -> Iterator[Entry]:
        yield from self.store.listed(prefix)

    def list(self, prefix: str) -> Iterator[str]:
        for entry in self.store.listed(prefix):
            yield entry.name

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        raise AssertionError("readers do not write")

    def put_if_absent(self, name: str, data: bytes) -> bool:
        raise AssertionError("readers do not write")

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        raise AssertionError("readers do not write")

    def delete(self, name: str) -> None:
        raise AssertionError("readers do not write")


def misread(checkpoint: Checkpoint) -> str:
    """Restore a checkpoint; return what is wrong with it, or nothing. Errors of the store come through."""
    expected = contents(checkpoint.made_in, checkpoint.step)
    if set(checkpoint.specs.values()) != set(SPECS):
        return f"has the tensors {sorted(checkpoint.specs)}"
    if checkpoint.facts != facts(checkpoint.made_in, checkpoint.step):
        return f"has the facts {checkpoint.facts}"
    buffers = {spec: bytearray(len(data)) for spec, data in expected.items()}
    resolve(
        [(spec, spec.box) for spec in SPECS],
        checkpoint.offers(),
        {"store": checkpoint.source()},
        lambda spec, _: memoryview(buffers[spec]),
    )
    wrong = [spec.key for spec, data in expected.items() if bytes(buffers[spec]) != data]
    return f"{', '.join(wrong)} are not those of that step" if wrong else ""


class Checker:
    """Checks every change, and the outcome of every call of an actor."""

    def __init__(self, store: ModelStore, keep: int) -> None:
        self.violations: list[str] = []
        self.commits = 0
        self.refusals = 0
        self.ref: Ref | None = None
        self.collected: set[str] = set()
        self._store = store
        self._keep = keep
        self._fenced = -1
        self._reported: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._shown: dict[int, str] = {}  # by call: the checkpoint that its swap made visible
        self._announced: dict[str, tuple[str, Held]] = {}  # by announcement: whose it is, and as it was written
        self._needs: dict[str, set[str]] = {}  # by committed checkpoint: the objects it was read from
        store.observers.append(self.changed)

    def violated(self, text: str) -> None:
        """Record a violation."""
        self.violations.append(f"{int(self._store.now)}: {text}")

    @property
    def committed(self) -> tuple[str, ...]:
        """Every checkpoint that is committed, newest first."""
        return self.ref.committed if self.ref else ()

    # Reports of actors.

    def fenced(self, generation: int) -> None:
        """`fence` returned: no commit of an older generation may take effect from here on."""
        self._fenced = max(self._fenced, generation)

    def reported(self, actor: str, checkpoint: str) -> None:
        """`commit` returned: the checkpoint is committed until a collector may take it."""
        self.commits += 1
        if checkpoint not in self.committed and checkpoint not in self.collected:
            self.violated(f"{actor} was told that {checkpoint} is committed, and latest does not have it")
        self._reported[checkpoint] = actor

    def refused(self, actor: str, call: int, checkpoint: str, why: str, *, for_good: bool) -> None:
        """`commit` refused: that call has shown nothing, and where it is for good nobody will.

        Once a collector has taken what it did show, nothing in the store can tell it from what never was.
        """
        self.refusals += 1
        if call in self._shown and self._shown[call] not in self.collected:
            self.violated(f"{actor} was refused ({why}), and yet its own swap made {self._shown[call]} visible")
        elif for_good:
            self._refused[checkpoint] = f"{actor}: {why}"
            if checkpoint in self.committed:
                self.violated(f"{actor} was refused ({why}), and yet {checkpoint} is committed")

    def clean(self) -> None:
        """Collectors had all the time they need: all that is left must be needed by a committed checkpoint."""
        needed = {name for needs in self._needs.values() for name in needs}
        left = [name for name in self._store.objects if name.startswith(_ONCE) and name not in needed]
        if left and not self.violations:
            self.violated(
                f"{len(left)} objects are needed by nobody and never collected: {', '.join(sorted(left)[:3])}"
            )

    def unreadable(self, actor: str, checkpoint: str, why: str) -> None:
        """An undisturbed reader could not restore a checkpoint."""
        if checkpoint in self.committed:
            self.violated(f"{actor} could not restore the committed {checkpoint}: {why}")

    def lost(self, actor: str, checkpoint: str, why: str) -> None:
        """An undisturbed reader lost a checkpoint that it had announced and then found committed."""
        for name, (whose, held) in self._announced.items():
            entry = decode_announcement(held.data, name)
            if (whose, entry.checkpoint) == (actor, checkpoint) and self._store.now < held.modified + entry.expires:
                self.violated(f"{actor} had announced that it reads {checkpoint}, and could not: {why}")

    def torn(self, actor: str, checkpoint: str, wrong: str) -> None:
        """A restored checkpoint mixed several steps."""
        self.violated(f"{actor} restored {checkpoint}: it {wrong}")

    # Reports of the store.

    def changed(self, change: Change) -> None:
        """Look at one change."""
        name, before, after = change.name, change.before, change.after
        if names.is_announcement(name):
            self._announced.pop(name, None)
            if after is not None:
                self._announced[name] = change.request.actor, after
            return
        if name == names.LATEST:
            self._moved(change)
        elif before and after and before.data != after.data and name.startswith(_ONCE):
            self.violated(f"{change.request.actor} changed {name}, which is written once")
        for checkpoint in [c for c, needs in self._needs.items() if name in needs]:
            if after is None or before is None or before.data != after.data:
                self._look(checkpoint, f"after {change.request.actor} did {change.request.verb} {name}")

    def _moved(self, change: Change) -> None:
        was, who = self.ref, change.request.actor
        if change.after is None:
            self.violated(f"{who} deleted latest")
            self.ref = None
            return
        try:
            ref = self.ref = decode_ref(change.after.data, names.LATEST)
        except CheckpointError as error:
            self.violated(f"{who} damaged latest: {error}")
            return
        self._order(was, ref, who)
        for checkpoint in set(ref.committed) - set(was.committed if was else ()):
            self._appeared(checkpoint, ref, change.request)
        for checkpoint in set(was.committed if was else ()) - set(ref.committed):
            self._vanished(checkpoint, was, change.request)

    def _order(self, was: Ref | None, ref: Ref, who: str) -> None:
        if was is None:
            return
        if ref.generation < was.generation:
            self.violated(f"{who} took the generation of latest back from {was.generation} to {ref.generation}")
        if was.checkpoint is not None and (
            ref.checkpoint is None or (ref.made_in or 0, ref.step or 0) < (was.made_in or 0, was.step or 0)
        ):
            self.violated(f"{who} took latest back from {was.checkpoint} to {ref.checkpoint}")

    def _appeared(self, checkpoint: str, ref: Ref, request: Request) -> None:
        parsed = names.parse_checkpoint(checkpoint)
        assert parsed is not None, "decoding a ref checks its names"
        self._shown[request.call] = checkpoint
        if parsed[1] < self._fenced:
            self.violated(f"{request.actor} committed {checkpoint}, though generation {self._fenced} had fenced it off")
        if checkpoint in self._refused:
            self.violated(f"{checkpoint} was refused ({self._refused[checkpoint]}), and {request.actor} committed it")
        if checkpoint != ref.checkpoint:
            self.violated(f"{request.actor} put {checkpoint} among the earlier ones, and it never was latest")
        self._look(checkpoint, f"when {request.actor} committed it")

    def _vanished(self, checkpoint: str, was: Ref | None, request: Request) -> None:
        self._needs.pop(checkpoint, None)
        order = list(was.committed if was else ())
        if request.actor.startswith("collector") and order.index(checkpoint) >= self._keep:
            self.collected.add(checkpoint)
            return
        witness = f", of which {self._reported[checkpoint]} was told" if checkpoint in self._reported else ""
        self.violated(f"{request.actor} lost the committed {checkpoint}{witness}")

    def _look(self, checkpoint: str, when: str) -> None:
        """Restore a committed checkpoint from the store as it is."""
        view = View(self._store)
        latest = self.ref is not None and checkpoint == self.ref.checkpoint
        what = "latest" if latest else "the committed checkpoint"
        self._needs.pop(checkpoint, None)
        try:
            wrong = misread(open_checkpoint(view, self.ref if latest and self.ref else checkpoint))
        except CheckpointError as error:
            self.violated(f"{what} {checkpoint} cannot be restored {when}: {error}")
            return
        self._needs[checkpoint] = view.seen - {names.LATEST}
        if wrong:
            self.violated(f"{what} {checkpoint} {wrong} {when}")
