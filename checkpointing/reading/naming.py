"""Finds a checkpoint by what a person or a program calls it (format.md, section 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checkpointing.errors import Corrupt, FormatError, NewerFormat, NoCheckpoint, StoreNotFound, Tampered
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.history import History, decode_history
from checkpointing.format.refs import Older, Ref, Target, comes_after, decode_ref
from checkpointing.stores.protocol import Store, Versioned, decides_creations

LATEST = "latest"
VERIFIED = "verified"
VETTED = "vetted"
_SHOWN = 5


def read_ref(store: Store, name: str = LATEST) -> Ref | None:
    """Return the ref `latest`, or `verified`, `vetted` or a tag in the form of one; None if it was never written.

    FormatError if `refs/latest` is damaged: `checkpointing.retention.ref_repair.repair_latest` writes it anew.
    """
    ref, _ = read_versioned(store)
    if name == LATEST or ref is None:
        return ref
    target = _named(ref, name)
    if target is None:
        return None
    parsed = names.parse_checkpoint(target.checkpoint)
    assert parsed is not None, "the ref was decoded"
    return Ref(
        generation=ref.generation,
        checkpoint=target.checkpoint,
        record_digest=target.record_digest,
        step=parsed[0].step,
        made_in=parsed[0].made_in,
        write_id=ref.write_id,
    )


def read_versioned(store: Store) -> tuple[Ref | None, str | None]:
    """Return `latest` and the token that a swap of it must name; (None, None) if it was never written.

    Corrupt if it was and is gone, as its shadow says: whoever began it anew would let those in that it keeps out, and a
    collection would delete what it does not know of.
    """
    try:
        versioned = read_newest(store)
        if versioned is None and _has_shadow(store):
            # It may have been written just now.
            versioned = read_newest(store)
            if versioned is None:
                raise Corrupt(f"{names.LATEST}: it is gone, and {names.SHADOW}, a copy of it, is there")
        return (None, None) if versioned is None else (decode_ref(versioned.data, names.LATEST), versioned.token)
    except NewerFormat:
        raise
    except FormatError as error:
        where = "" if isinstance(error, Tampered) else f"store {store.url}: "
        advice = "no checkpoint is lost; `elastic3d ckpt repair` finds them and writes the ref anew"
        raise type(error)(f"{where}{error}: {advice}") from error


def read_newest(store: Store) -> Versioned | None:
    """Return the object of `latest`, and the token that a swap of it must name; None if there is none.

    Of a store with a register it is the published copy if that is newer: an etcd that was restored from a backup has an
    older one, and the next swap gives it the newer again.
    """
    if decides_creations(store):
        return store.read(names.LATEST)
    try:
        published = store.get(names.LATEST)
    except (StoreNotFound, Tampered):
        return store.read(names.LATEST)
    decided = store.read(names.LATEST)  # after the copy, so that it is the older one only if the register went back
    if decided is None or decided.data == published:
        return decided
    try:
        went_back = comes_after(decode_ref(published, names.LATEST), decode_ref(decided.data, names.LATEST))
    except NewerFormat:
        raise
    except FormatError:
        return decided
    return Versioned(data=published, token=decided.token) if went_back else decided


def _has_shadow(store: Store) -> bool:
    try:
        store.size(names.SHADOW)
    except StoreNotFound:
        return False
    return True


def committed(store: Store, ref: Ref | None) -> tuple[str, ...]:
    """Return every committed checkpoint, newest first, including those of the history."""
    if ref is None:
        return ()
    return (*ref.committed, *(name for part in history(store, ref.older) for name in part.checkpoints))


def history(store: Store, older: Older | None) -> Iterator[History]:
    """Yield the parts of the history, newest first; Corrupt if one is missing or not the one linked to."""
    while older is not None:
        try:
            data = store.get(older.name)
        except StoreNotFound:
            raise Corrupt(f"store {store.url}: {older.name}: is missing; `elastic3d ckpt repair` rebuilds it") from None
        if hexdigest(data) != older.digest:
            raise Corrupt(f"store {store.url}: {older.name}: is damaged; `elastic3d ckpt repair` rebuilds it")
        part = decode_history(data, older.name)
        yield part
        older = part.older


def resolve_name(store: Store, text: str) -> str:
    """Return the name of the checkpoint that `text` means; NoCheckpoint if it means none, or several.

    Tried in this order: `latest`, `verified`, `vetted`, a tag, a checkpoint's whole name, a step (the newest checkpoint
    of it), the beginning of one checkpoint's name. Only committed checkpoints are found.
    """
    return find(store, text)[0]


def find(store: Store, text: str) -> tuple[str, str | None]:
    """Return the result of `resolve_name`, and the digest of the checkpoint's record if a ref has it."""
    ref, _ = read_versioned(store)
    if ref is None or ref.checkpoint is None:
        raise NoCheckpoint(f"store {store.url}: nothing was ever committed here")
    if text == LATEST:
        return ref.checkpoint, ref.record_digest
    target = _named(ref, text)
    if target is not None:
        return target.checkpoint, target.record_digest
    if text == VERIFIED:
        raise NoCheckpoint(f"store {store.url}: no checkpoint was marked as verified yet")
    if text == VETTED:
        raise NoCheckpoint(
            f"store {store.url}: no checkpoint is vetted. One is once every node that made it agreed with others in "
            "an audit of that step or a later one: where audits are off, or only one data-parallel rank is there, none "
            "ever is. Name another, such as `verified`"
        )
    name = match(committed(store, ref), text, where=f"store {store.url}")
    return name, _digest(ref, name)


def _named(ref: Ref, text: str) -> Target | None:
    """Return what `verified`, `vetted` or a tag points to; stores of before may have a tag called `vetted`."""
    if text == VERIFIED:
        return ref.verified
    if text == VETTED and ref.vetted is not None:
        return ref.vetted
    return ref.tags.get(text)


def match(kept: Sequence[str], text: str, *, where: str) -> str:
    """Return the checkpoint of `kept` (newest first) that a name, a step, or the beginning of a name means."""
    if text in kept:
        return text
    if text.isascii() and text.isdigit() and len(text) < 20:
        for name in kept:
            if int(name.partition(".")[0]) == int(text):
                return name
    matches = [name for name in kept if name.startswith(text)] if text else []
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(matches[:_SHOWN]) + (", ..." if len(matches) > _SHOWN else "")
        raise NoCheckpoint(
            f"{where}: {text!r} begins the names of {len(matches)} checkpoints: {shown}; give more of it"
        )
    raise NoCheckpoint(f"{where}: {text!r} is no tag, step or committed checkpoint; `ls` shows those there")


def _digest(ref: Ref, name: str) -> str | None:
    if name == ref.checkpoint:
        return ref.record_digest
    targets: list[Target] = [*ref.tags.values(), *(target for target in (ref.verified, ref.vetted) if target)]
    return next((target.record_digest for target in targets if target.checkpoint == name), None)
