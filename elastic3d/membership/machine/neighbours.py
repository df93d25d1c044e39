"""A member's neighbours on the ring: those it watches, those that watch it, and which of these it does not hear."""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.view import View
from elastic3d.values import Node


class Neighbours:
    """The neighbours of the node `id`. silent: those it does not hear, sorted."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._watch = acts.WatchPeers(peers=())
        self._near: frozenset[str] = frozenset()
        self.silent: tuple[str, ...] = ()

    def hear(self, event: e.PeerHeard) -> None:
        """Take in that a neighbour is heard, or is not any more."""
        silent = set(self.silent)
        # The silence of a node that is not a neighbour would never be reported to be over.
        (silent.discard if event.alive or event.id not in self._near else silent.add)(event.id)
        self.silent = tuple(sorted(silent))

    def follow(self, view: View, actions: list[acts.Action]) -> None:
        """Watch the next two on the ring, expect the two before, and forget what was heard of others."""
        ring = view.ring
        watch = acts.WatchPeers(peers=())
        if self._id in ring.index and self._id not in view.tombs:
            after, before = ring.after(self._id, view.tombs), ring.before(self._id, view.tombs)
            watch = acts.WatchPeers(
                peers=tuple(map(_peer, after)),
                expected=tuple(node.id for node in before),
                near=tuple(map(_peer, before)),
            )
        if watch != self._watch:
            self._watch = watch
            self._near = frozenset((*(peer.id for peer in watch.peers), *watch.expected))
            self.silent = tuple(id for id in self.silent if id in self._near)
            actions.append(watch)


def _peer(node: Node) -> acts.RingPeer:
    return acts.RingPeer(id=node.id, address=node.address, port=node.heartbeat_port)
