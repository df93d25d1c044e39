"""Heartbeat connections between the members of one job, watched from both ends.

Each member listens, and dials the peers it is told to watch; over each connection (`wire`) both ends prove that they
are of the run, send a beat every `interval`, and count whatever arrives as the other's heartbeat. An id is silent when
nothing has arrived from it for `silence` seconds over any connection; one that was never heard has `fresh` seconds,
since it may not know the ring yet.

End of file is a hint, not a death: the watcher dials again. Only a refused connection - the host is up, nobody listens
- or another identity behind that port is the death of the incarnation meant, and only if another neighbour that is
asked at once finds the same (`witness`), where there is another. A claim to that identity without a proof is reported
to people, and is neither heartbeat nor death. A silent connection is given up for a new one, so that a path that was
mended need not wait for TCP's own, ever slower, retransmissions. A connection from a node that is not expected is
served, and counts for nothing.

Time in which this loop did not run counts against nobody: a member that was stopped or starved accuses no one of the
silence it slept through. And patience grows with the gaps a neighbour has shown (`neighbour`).

One thread; callbacks run on it and must not block. Beats do not wake it: an established connection wakes it only when
it ends. Every `interval`, and once more before a silence is reported, one system call says on which of them something
arrived. Only for a while after one of them ended, when questions and answers are due, does every arrival wake it: a
death ends a connection of every node that can be asked about it. Whatever stops all threads of the process for long,
such as a full garbage collection, is a pause like any other: the owner of the links keeps such pauses short.
"""

from __future__ import annotations

import queue
import select
import socket
from collections.abc import Callable

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.asking import Asking, Trying, id_of
from elastic3d.membership.driver.messages import Answer, Message
from elastic3d.membership.driver.neighbour import Neighbour
from elastic3d.membership.driver.wire import Dial, Guest, ReadResult
from elastic3d.membership.driver.witness import TryResult
from elastic3d.trust import handshake
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import Encryption
from elastic3d.trust.handshake import Answering, PortRole
from elastic3d.trust.listening import (
    ACCEPTED_AT_ONCE,
    BACKLOG,
    Listener,
    Refusal,
    Refusals,
    Waiting,
    family,
    most_known,
)
from elastic3d.trust.stream import Stream

INTERVAL = 0.2
"""Seconds between two beats."""

SILENCE = 1.1
"""Seconds without a beat after which silence is reported: five beats lost, or a pause longer than a busy machine's."""

FRESH = 3.0
"""Seconds for the first beat of a node newly watched or expected."""

PAUSE = 0.5
"""Seconds this loop may be late before that time is taken off everybody's silence."""

ATTENTIVE = 1.0
"""Seconds after the end of a connection for which arrivals over others are read at once: questions and answers."""

ABANDONED = 10.0
"""Seconds after which a guest that says nothing is closed: half-open connections of hosts that vanished."""


class Links:
    """Listens for the nodes that watch this member, and watches the peers it is given.

    secret: the run's. encryption: how connections are encrypted, None for not at all. refused: called with each
    connection that was turned away, on the links' thread.
    """

    def __init__(
        self,
        address: str,
        tell: Callable[[e.PeerHeard | e.PeerRefused], None],
        *,
        secret: str,
        encryption: Encryption | None = None,
        refused: Callable[[Refusal], None] = lambda refusal: None,
        interval: float = INTERVAL,
        silence: float = SILENCE,
        fresh: float = FRESH,
        clock: Clock = SYSTEM,
    ) -> None:
        self._tell, self._clock = tell, clock
        self._interval, self._silence, self._fresh = interval, silence, fresh
        self._credentials, self._encryption = Credentials(secret=secret, id=""), encryption
        self._refused = Refusals("links", refused, clock=clock)
        listening = socket.create_server((address, 0), family=family(address), backlog=BACKLOG)
        listening.setblocking(False)
        self._listener = Listener(listening, self._refused)
        self.port: int = self._listener.port
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._listener.socket, select.EPOLLIN)
        self._poll.register(self._wake_out, select.EPOLLIN)
        self._arrivals = select.epoll()
        self._listen_at: float | None = None
        self._ends: dict[int, Dial | Guest] = {}
        self._waiting: Waiting[Guest] = Waiting()
        self._orders: queue.SimpleQueue[acts.WatchPeers | Credentials | str] = queue.SimpleQueue()
        self._dials: dict[str, Dial] = {}
        self._asking, self._trying = Asking(), Trying()
        self._doubted: set[str] = set()
        self._refusing: set[str] = set()
        self._attentive_until = 0.0
        self._expected: frozenset[str] = frozenset()
        self._neighbours: dict[str, Neighbour] = {}
        self._beat_at = 0.0
        self._closed = False
        self._thread = threads.start(self._loop, name="elastic3d-links")

    def speak_for(self, id: str) -> None:
        """Be this incarnation from now on. Nobody is watched any more; callers that mean an earlier one are told so."""
        self._orders.put(id)
        self._wake()

    def set_secret(self, secret: str) -> None:
        """Use another secret for the connections to come; those that stand go on."""
        self._orders.put(Credentials(secret=secret, id=""))
        self._wake()

    def watch(self, ring: acts.WatchPeers) -> None:
        """Watch these peers, expect those ids, and nobody else; what is already known of them is reported again."""
        self._orders.put(ring)
        self._wake()

    def close(self) -> None:
        """Stop listening and watching. Idempotent."""
        if not self._closed:
            self._closed = True
            self._wake()
            self._thread.join(timeout=5)
            self._wake_in.close()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"w")
        except OSError:
            pass  # woken already, or closed

    # The loop's thread.

    def _loop(self) -> None:
        turned_at = self._clock.monotonic()
        while not self._closed:
            patience = self._patience(turned_at)
            ready = self._poll.poll(patience)
            now = self._clock.monotonic()
            if patience is not None and now - turned_at - patience >= PAUSE:
                self._forgive(now - turned_at - patience)
            turned_at = now
            if any(descriptor == self._wake_out.fileno() for descriptor, _mask in ready):
                # Before the orders are taken: a byte that comes in between belongs to an order that is taken below.
                self._wake_out.recv(4096)
            # First: a node that connects now means this member's newest incarnation.
            self._obey(now)
            for descriptor, _mask in ready:
                if descriptor == self._listener.socket.fileno():
                    self._accept(now)
                elif descriptor == self._arrivals.fileno():
                    self._listen(now)
                elif descriptor in self._ends:
                    self._read(self._ends[descriptor], now)
            if self._listen_at is not None and now >= self._listen_at:
                self._listen_at = None
                self._poll.register(self._listener.socket, select.EPOLLIN)
            if now >= self._beat_at:
                self._beat(now)
            self._judge(now)
            for dial in (*self._dials.values(), *self._trying.dials):
                if dial.socket is None and now >= dial.retry_at:
                    self._dial(dial, now)
            self._conclude(now)
            if self._attentive_until and now >= self._attentive_until:
                self._poll.unregister(self._arrivals)
                self._attentive_until = 0.0
        for end in (*self._ends.values(), self._listener, self._wake_out, self._poll, self._arrivals):
            end.close()

    def _patience(self, now: float) -> float | None:
        """Return the seconds until there is something to do without news from a socket; None for never."""
        times = [neighbour.silent_at for neighbour in self._neighbours.values() if neighbour.alive is not False]
        times += [dial.retry_at for dial in (*self._dials.values(), *self._trying.dials) if dial.socket is None]
        times += [due for due in (self._asking.due, self._trying.due) if due is not None]
        if self._ends:
            times.append(self._beat_at)
        if self._listen_at is not None:
            times.append(self._listen_at)
        return max(0.0, min(times) - now) if times else None

    def _forgive(self, lost: float) -> None:
        for neighbour in self._neighbours.values():
            neighbour.forgive(lost)
        for end in self._ends.values():
            end.moved_at += lost

    def _obey(self, now: float) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if isinstance(order, Credentials):
                self._credentials = order.of(self._credentials.id)
            elif isinstance(order, str):
                self._credentials = self._credentials.of(order)
                self._arrange(acts.WatchPeers(peers=()), now)
                for end in list(self._ends.values()):
                    self._drop(end)
            else:
                self._arrange(order, now)

    def _arrange(self, ring: acts.WatchPeers, now: float) -> None:
        wanted = {peer.id: peer for peer in ring.peers}
        for id in [id for id, dial in self._dials.items() if wanted.get(id) != dial.peer]:
            self._drop(self._dials.pop(id))
            self._asking.forget(id)
            self._doubted.discard(id)
            self._refusing.discard(id)
        for dial in self._trying.arrange((*ring.near, *ring.peers), now):
            self._drop(dial)
        for id, peer in wanted.items():
            if id not in self._dials:
                self._dials[id] = Dial(peer=peer)
        known, self._neighbours = self._neighbours, {}
        for id in dict.fromkeys((*wanted, *ring.expected)):
            neighbour = known.get(id)
            if neighbour is None:
                neighbour = Neighbour(silent_at=now + self._fresh)
            else:
                if id not in wanted and id not in self._expected:
                    # It has to dial us now, instead of us dialling it, and may not know it yet.
                    neighbour.silent_at = max(neighbour.silent_at, now + self._fresh)
                if neighbour.alive is not None:
                    self._tell(e.PeerHeard(id=id, alive=neighbour.alive))
            self._neighbours[id] = neighbour
        self._expected = frozenset(ring.expected)

    def _beat(self, now: float) -> None:
        """Listen and beat over every connection; give up those that fell silent."""
        self._beat_at = now + self._interval
        self._listen(now)
        for end in list(self._ends.values()):
            if not end.beat():
                self._ended(end, now)
            elif isinstance(end, Dial) and now - end.moved_at >= self._silence:
                self._dial(end, now)
            elif isinstance(end, Guest) and not end.known and now - end.moved_at >= handshake.SECONDS:
                end.distrust = f"did not prove itself within {handshake.SECONDS:g} s"
                self._ended(end, now)
            elif now - end.moved_at >= ABANDONED:
                self._drop(end)

    def _listen(self, now: float) -> None:
        """Read every connection over which something arrived since the last time."""
        for descriptor, _mask in self._arrivals.poll(0):
            end = self._ends.get(descriptor)
            if end is not None:
                self._read(end, now)

    def _judge(self, now: float) -> None:
        def due() -> list[tuple[str, Neighbour]]:
            there = self._neighbours.items()
            return [(id, one) for id, one in there if one.alive is not False and now >= one.silent_at]

        if not due():
            return
        # Whatever has arrived is read before anybody is judged.
        self._listen(now)
        for id, neighbour in due():
            neighbour.alive = False
            self._tell(e.PeerHeard(id=id, alive=False))

    def _heard(self, id: str, now: float) -> None:
        neighbour = self._neighbours.get(id)
        if neighbour is None:
            return
        self._refusing.discard(id)
        neighbour.heard(now, self._silence)
        if neighbour.alive is not True:
            neighbour.alive = True
            self._tell(e.PeerHeard(id=id, alive=True))

    # Connections.

    def _accept(self, now: float) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            accepted = self._listener.accept()
            if accepted is None:
                return
            if isinstance(accepted, float):
                if accepted:
                    # Otherwise it would wake the loop for ever.
                    self._poll.unregister(self._listener.socket)
                    self._listen_at = now + accepted
                return
            self._welcome(*accepted, now)

    def _welcome(self, connection: socket.socket, address: str, now: float) -> None:
        if len(self._ends) - len(self._waiting) >= most_known():
            self._refused(address, "too many connections of this run's own stand already")
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = Stream(connection, self._encryption, answers=True)
        opening = Answering(self._credentials, PortRole.LINK, binding=stream.binding)
        guest = Guest(stream=stream, address=address, moved_at=now, me=self._credentials.id, opening=opening)
        self._ends[connection.fileno()] = guest
        self._poll.register(connection, guest.mask)
        crowded = self._waiting.add(guest, address)
        if crowded is not None:
            crowded.distrust = "too many connections that have not proved themselves"
            self._ended(crowded, now)

    def _dial(self, dial: Dial, now: float) -> None:
        self._drop(dial)
        result = dial.open(self._credentials, self._encryption, now)
        if dial.socket is not None:
            self._ends[dial.socket.fileno()] = dial
            self._poll.register(dial.socket, dial.mask)
        self._take(dial, result, now)

    def _read(self, end: Dial | Guest, now: float) -> None:
        before = end.mask
        result = end.read(now)
        if end.socket is not None and end.mask != before:
            self._poll.modify(end.socket, end.mask)
            if end.known:
                if isinstance(end, Guest):
                    self._waiting.remove(end)
                self._arrivals.register(end.socket, select.EPOLLIN | select.EPOLLET)
        for message in end.said():
            self._hear(end, message, now)
        self._take(end, result, now)

    def _take(self, end: Dial | Guest, result: ReadResult, now: float) -> None:
        if isinstance(end, Dial) and self._trying.takes(end):
            if result is ReadResult.ENDED:
                self._ended(end, now)
            elif result is not ReadResult.NOTHING:
                self._trying.conclude(end, TryResult.REACHED if result is ReadResult.HEARD else TryResult.REFUSED, now)
                self._drop(end)
        elif result is ReadResult.HEARD:
            self._heard(end.id if isinstance(end, Guest) else end.peer.id, now)
            if isinstance(end, Dial):
                self._doubted.discard(end.peer.id)
        elif result is ReadResult.ENDED:
            self._ended(end, now)
        elif result is ReadResult.REFUSED:
            assert isinstance(end, Dial)
            self._drop(end)
            end.retry_at = now + self._silence
            self._refusing.add(end.peer.id)
            self._inquire(end, now)

    def _ended(self, end: Dial | Guest, now: float) -> None:
        """Dial again, at once if it had answered before, else soon: a dying process closes its ports one by one."""
        if end.known:
            self._attend(now)
        if end.distrust:
            self._refused(end.where, end.distrust)
        if isinstance(end, Dial):
            pause = (
                self._silence
                if end.distrust
                else 0.0
                if end.known
                else self._interval / 4
                if end.connected
                else self._interval
            )
            end.retry_at = now + pause
            if not self._trying.takes(end):
                self._refusing.discard(end.peer.id)
        self._drop(end)

    def _drop(self, end: Dial | Guest) -> None:
        if end.socket is not None:
            del self._ends[end.socket.fileno()]
            self._poll.unregister(end.socket)
            if end.known:
                self._arrivals.unregister(end.socket)
                self._asking.lost(end)
                self._trying.lost(end)
            if isinstance(end, Guest):
                self._waiting.remove(end)
            end.close()

    def _attend(self, now: float) -> None:
        """Read what arrives at once, for a while."""
        if not self._attentive_until:
            self._poll.register(self._arrivals, select.EPOLLIN)
        self._attentive_until = now + ATTENTIVE

    def _inquire(self, dial: Dial, now: float) -> None:
        """Ask the other neighbours about one that refuses; of two nodes neither has anybody to ask."""
        id = dial.peer.id
        others = self._neighbours.keys() - {id}
        if not others:
            # Its end may have arrived beside the refusal.
            self._listen(now)
        standing = self._standing()
        if not others and not (id in standing and self._neighbours[id].alive):
            self._tell(e.PeerRefused(id=id, evidence=dial.refusal))
            return
        self._asking.ask(dial, [standing[other] for other in sorted(others & standing.keys())], now)
        self._attend(now)

    def _standing(self) -> dict[str, Dial | Guest]:
        """Return, for each neighbour that has one, the connection over which it was heard last."""
        known = sorted((end for end in self._ends.values() if end.known), key=lambda end: end.moved_at)
        return {id_of(end): end for end in known if id_of(end) in self._neighbours}

    def _conclude(self, now: float) -> None:
        for outcome in self._asking.concluded(now):
            dial = self._dials[outcome.id]
            alone = self._refusing >= self._neighbours.keys() and not self._standing()
            if outcome.evidence or (alone and not outcome.lives):
                evidence = outcome.evidence or f"{dial.refusal}; all other neighbours refuse this node as well"
                self._tell(e.PeerRefused(id=outcome.id, evidence=evidence))
                continue
            dial.retry_at = now + (self._silence if outcome.lives else self._interval)
            # When everybody leaves at the job's end, nobody can tell for a moment; that is not worth a report.
            news = outcome.id not in self._doubted and (outcome.lives or self._neighbours[outcome.id].alive is False)
            if news and self._refused(dial.where, outcome.doubt):
                self._doubted.add(outcome.id)
        for dial in self._trying.overdue(now):
            self._drop(dial)

    def _hear(self, end: Dial | Guest, message: Message, now: float) -> None:
        """Take in an answer, or try what is asked."""
        if isinstance(message, Answer):
            self._asking.answered(end, message)
            return
        dial = self._trying.asked(end, message, now, neighbour=id_of(end) in self._neighbours)
        if dial is not None:
            self._dial(dial, now)
