"""What became of a job that was played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chaos.faults.fault import Fault
from chaos.history.follow import Event, Injection, Picture
from chaos.playing.setting import Setting
from elastic3d.values import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a history.

    asked: the layout that anybody's script asks for, None for none. killed, dismissed: nodes ended by SIGKILL and by
    SIGTERM. unwanted: nodes that were to be turned away. undone: faults whose moment never came. late: those that were
    begun and had not happened when the job ended, or whose moment was seen only then. unmet: those that no request of
    the store has met since. failure: that it was left standing, and was given up, or "". logs: by node, the end of what
    an agent printed that ended as it should not have. store: the URL of its checkpoints. injections: what was done, and
    when. made: the faults that were made, and when. hit: the node that each of `made` happened to, "" for none. events:
    of all nodes, by this machine's clock. damage: what was found wrong with committed checkpoints when every byte of
    the store was read at the end.
    """

    setting: Setting
    faults: tuple[Fault, ...]
    picture: Picture
    digest: str | None
    exit_codes: Mapping[str, int | None]
    killed: tuple[str, ...]
    undone: tuple[Fault, ...]
    leftovers: tuple[str, ...]
    dismissed: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    failure: str = ""
    logs: Mapping[str, str] = field(default_factory=dict)
    store: str = ""
    injections: tuple[Injection, ...] = ()
    made: tuple[tuple[Fault, float], ...] = ()
    hit: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    damage: tuple[str, ...] = ()
    unmet: tuple[Fault, ...] = ()
    late: tuple[Fault, ...] = ()
    asked: Layout | None = None
