"""Tags, pins, `verified` and `vetted`, which keep a checkpoint from being collected (format.md, section 8).

All are fields of `refs/latest`, so that each change is a swap that no sweep and no commit can overlook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from checkpointing.errors import KeepRefused, NoCheckpoint
from checkpointing.format import names
from checkpointing.format.distrust import Distrust
from checkpointing.format.encoding import hexdigest
from checkpointing.format.record import decode_record
from checkpointing.format.refs import (
    Ref,
    Target,
    Verdict,
    decide_distrust,
    decide_pin,
    decide_tag,
    decide_verified,
    decide_vetted,
    distrusting_ref,
)
from checkpointing.reading.naming import VETTED, committed, read_versioned, resolve_name
from checkpointing.saving import ref_update
from checkpointing.stores.protocol import Store

_REASON = 1000


def tags(store: Store) -> dict[str, str]:
    """Return the checkpoints that tags point to, by tag."""
    ref, _ = read_versioned(store)
    return {name: target.checkpoint for name, target in sorted(ref.tags.items())} if ref else {}


def pins(store: Store) -> dict[str, str]:
    """Return the reasons for pins, by checkpoint."""
    ref, _ = read_versioned(store)
    return dict(sorted(ref.pins.items())) if ref else {}


def tag(store: Store, name: str, checkpoint: str, move: bool = False) -> str:
    """Give a committed checkpoint (anything `resolve_name` takes) another name, and return its own.

    With `move`, a tag that points elsewhere is moved; KeepRefused without. ValueError for text that cannot be a tag;
    NoCheckpoint if there is no such checkpoint, or it is no longer kept.
    """
    if not names.is_tag(name) or name == VETTED:
        raise ValueError(
            f"{name!r} cannot be a tag: up to 100 letters, digits and . _ + -, beginning with a letter or digit, and "
            "neither a number nor `latest`, `verified` or `vetted`"
        )
    target = _target(store, checkpoint)
    verdict, ref = _move(
        store,
        lambda ref, kept: decide_tag(ref, kept, name, target, move=move),
        lambda ref: dataclasses.replace(ref, tags={**ref.tags, name: target}),
    )
    if verdict is Verdict.TAKEN:
        assert ref is not None, "the tag is there"
        there = ref.tags[name].checkpoint
        raise KeepRefused(f"store {store.url}: tag {name} points to {there}; move it to point it to another")
    _check_kept(store, verdict, target.checkpoint)
    return target.checkpoint


def untag(store: Store, name: str) -> bool:
    """Remove a tag; False if there was none. The checkpoint stays until a collection drops it."""
    verdict, _ = _move(
        store,
        lambda ref, _: Verdict.MOVE if ref is not None and name in ref.tags else Verdict.DONE,
        lambda ref: dataclasses.replace(ref, tags={key: t for key, t in ref.tags.items() if key != name}),
    )
    return verdict is Verdict.MOVE


def pin(store: Store, checkpoint: str, reason: str) -> str:
    """Keep a committed checkpoint until it is unpinned, and return its name; a new reason replaces the old one."""
    if not reason.isprintable() or len(reason) > _REASON:
        raise ValueError(f"a reason has at most {_REASON} printable characters")
    name = resolve_name(store, checkpoint)
    verdict, _ = _move(
        store,
        lambda ref, kept: decide_pin(ref, kept, name, reason),
        lambda ref: dataclasses.replace(ref, pins={**ref.pins, name: reason}),
    )
    _check_kept(store, verdict, name)
    return name


def unpin(store: Store, checkpoint: str) -> bool:
    """Remove a checkpoint's pin; False if it had none."""
    name = resolve_name(store, checkpoint)
    verdict, _ = _move(
        store,
        lambda ref, _: Verdict.MOVE if ref is not None and name in ref.pins else Verdict.DONE,
        lambda ref: dataclasses.replace(ref, pins={key: why for key, why in ref.pins.items() if key != name}),
    )
    return verdict is Verdict.MOVE


def mark_verified(store: Store, checkpoint: str) -> str:
    """Point `verified` to a committed checkpoint, unless it is already past it; return where it points now."""
    target = _target(store, checkpoint)
    verdict, ref = _move(
        store,
        lambda ref, kept: decide_verified(ref, kept, target),
        lambda ref: dataclasses.replace(ref, verified=target),
    )
    _check_kept(store, verdict, target.checkpoint)
    assert ref is not None, "decided"
    assert ref.verified is not None, "decided"
    return ref.verified.checkpoint


def mark_vetted(store: Store, checkpoint: str) -> str | None:
    """Point `vetted` to a committed checkpoint, unless it is past it or a rule refuses it; return where it points now.

    Whoever calls it knows that every node which took part in it was audited at its step or later.
    """
    target = _target(store, checkpoint)
    verdict, ref = _move(
        store,
        lambda ref, kept: decide_vetted(ref, kept, target),
        lambda ref: dataclasses.replace(ref, vetted=target),
    )
    _check_kept(store, verdict, target.checkpoint)
    assert ref is not None, "decided"
    return ref.vetted.checkpoint if ref.vetted is not None else None


def mark_distrusted(store: Store, rules: Collection[Distrust]) -> None:
    """Put rules into the store: no run, of whatever job, goes on from the checkpoints that they refuse.

    They stay for good, and checkpoints that are refused are kept or dropped as others are. NoCheckpoint where nothing
    was ever written to the store.
    """
    verdict, _ = ref_update.move(
        store,
        lambda ref: decide_distrust(ref, rules),
        lambda ref, write_id: distrusting_ref(_there(ref), rules, write_id),
        shadow=True,
    )
    if verdict is Verdict.UNKNOWN:
        raise NoCheckpoint(f"store {store.url}: nothing was ever written here")


def _there(ref: Ref | None) -> Ref:
    assert ref is not None, "nothing is decided about an absent ref"
    return ref


def _target(store: Store, checkpoint: str) -> Target:
    name = resolve_name(store, checkpoint)
    data = store.get(names.record(name))
    decode_record(data, names.record(name))
    return Target(checkpoint=name, record_digest=hexdigest(data))


def _move(
    store: Store, decide: Callable[[Ref | None, Collection[str]], Verdict], change: Callable[[Ref], Ref]
) -> tuple[Verdict, Ref | None]:
    def build(ref: Ref | None, write_id: str) -> Ref:
        return dataclasses.replace(change(_there(ref)), write_id=write_id)

    return ref_update.move(store, lambda ref: decide(ref, committed(store, ref)), build, shadow=True)


def _check_kept(store: Store, verdict: Verdict, checkpoint: str) -> None:
    if verdict is Verdict.UNKNOWN:
        raise NoCheckpoint(f"store {store.url}: {checkpoint} is not kept any more: a collection has dropped it")
