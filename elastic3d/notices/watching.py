"""Starts a watcher from options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic3d.clock import SYSTEM, Clock
from elastic3d.log import process_log
from elastic3d.notices import aws, azure, gcp
from elastic3d.notices.detect import detect
from elastic3d.notices.metadata import ADDRESS
from elastic3d.notices.notice import CloudNotice, NoticeKind
from elastic3d.notices.options import Choice, NoticeOptions
from elastic3d.notices.source import NoticeSource
from elastic3d.notices.watcher import Watcher


def watch(
    options: NoticeOptions,
    tell: Callable[[CloudNotice], None],
    *,
    withdrawn: Callable[[CloudNotice], None] | None = None,
    clock: Clock = SYSTEM,
) -> Watcher | None:
    """Listen as `options` say, and return the watcher, to be closed in the end; None if there is nothing to listen to.

    `tell` and `withdrawn` are called as Watcher says. Blocks while `detect` learns which cloud this is, if that is not
    said.
    """
    if options.choice is Choice.NONE:
        return None
    kind = detect(options.url, clock=clock) if options.choice is Choice.AUTO else NoticeKind(options.choice.value)
    if kind is None:
        if options.url:
            process_log().emit("notices.unknown", url=options.url, error="answers as none of aws, gcp, azure: name one")
        return None
    process_log().emit("notices.watched", cloud=kind.value, url=options.url or ADDRESS)
    return Watcher(
        _sources(kind, options.url or ADDRESS, clock),
        tell,
        withdrawn=withdrawn,
        rebalance=options.rebalance,
        clock=clock,
    )


def _sources(kind: NoticeKind, base: str, clock: Clock) -> Sequence[NoticeSource]:
    if kind is NoticeKind.AWS:
        return aws.sources(base, clock=clock)
    if kind is NoticeKind.GCP:
        return gcp.sources(base, clock=clock)
    return azure.sources(base, clock=clock)
