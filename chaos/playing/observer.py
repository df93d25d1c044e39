"""Events of a job whose script knows nothing of elastic3d, and which therefore writes none.

Somebody who looks at it from outside sees its memberships in etcd, the steps that its workers print, and the ends of
its agents. What is seen is written down as events of the same names, so that moments, patience and reports are those
of any other job:

    generation.sealed   the record of it has come to etcd; the ranks are all of one axis, `dp`
    member.joined       an incarnation of a node has come to etcd
    peer.lost           an incarnation was found dead by the others
    step.committed      a worker has printed a line with `step 12`, in whatever words, or as the job's own pattern has
                        it; its loss after `loss`, if any
    job.ended           an agent has ended; by an error where its exit code is not 0
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.machine.cluster import Cluster
from chaos.playing.step_lines import step_of, step_pattern
from elastic3d import etcd_keys as keys
from elastic3d.clock import Clock
from elastic3d.errors import EtcdError
from elastic3d.etcd import Changes, Delivery, EtcdClient, Snapshot, Watch
from elastic3d.etcd.watch import ListAgain
from elastic3d.log import check
from elastic3d.membership import events as m
from elastic3d.membership.reading import Reader
from elastic3d.membership.records import BaseUnknown, Out
from elastic3d.values import Generation

FILE = "observed.jsonl"


class Observer:
    """Write down in a file of `folder` what is seen of a job: of its etcd on threads of its own, of the rest by `look`.

    connect: returns a client of the job's etcd. root: the prefix of the job's keys. steps: of lines that tell one, as
    `step_pattern` takes it.
    """

    def __init__(
        self,
        cluster: Cluster,
        connect: Callable[[], EtcdClient],
        root: str,
        folder: Path,
        clock: Clock,
        steps: str = "",
    ) -> None:
        self._steps = step_pattern(steps)
        self._cluster, self._root, self._clock = cluster, root, clock
        self._file = (folder / FILE).open("a", buffering=1)
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._ended: set[tuple[str, int]] = set()
        self._read: dict[Path, int] = {}
        self._generation = self._step = 0
        self._stepped_at = clock.monotonic()
        self._client = connect()
        self._watches = [
            Watch(self._client, root + prefix, self._heard(Reader(root)), listed=root + listed)
            for prefix, listed in ((keys.BOARD, keys.LISTED), (keys.ROLL, keys.ROLL))
        ]

    def close(self) -> None:
        """See no more of it."""
        for watch in self._watches:
            watch.close()
        try:
            self._client.close()
        except EtcdError:
            pass  # it is away, or was replaced
        self._file.close()

    def look(self) -> bool:
        """Write down what agents and workers have done since the last call; return whether any of them has spoken."""
        spoken = False
        for node in self._cluster.nodes:
            code, life = node.process.poll(), (node.name, node.life)
            spoken |= self._read_log(node.name, node.log)
            if code is not None and life not in self._ended:
                self._ended.add(life)
                error = "" if code == 0 else f"exit code {code}"
                self._write("job.ended", node.name, kind="error" if code else "done", error=error)
        return spoken

    def _read_log(self, name: str, log: Path) -> bool:
        offset = self._read.get(log, 0)
        if log.stat().st_size <= offset:
            return False
        with log.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read[log] = offset + whole
        for line in data[:whole].decode(errors="replace").splitlines():
            if (step := step_of(line, self._steps)) is not None:
                self._note_step(name, *step)
        return whole > 0

    def _note_step(self, name: str, step: int, loss: float) -> None:
        """Write down a step, once in each generation, whichever rank tells it first."""
        with self._lock:
            if step <= self._step or not self._generation:
                return
            self._step, generation = step, self._generation
        now = self._clock.monotonic()
        seconds, self._stepped_at = now - self._stepped_at, now
        self._write(
            "step.committed",
            name,
            generation=generation,
            rank=0,
            step=step,
            loss=loss.hex(),
            seconds=seconds,
            samples=[0, 0],
        )

    # The watches' threads.

    def _heard(self, reader: Reader) -> Callable[[Delivery], None]:
        def deliver(news: Delivery) -> None:
            match news:
                case Snapshot():
                    self._take(reader.listed(news.kvs))
                case Changes():
                    for change in news.changes:
                        try:
                            self._take([reader.changed(change.key, change.kv, change.revision)])
                        except BaseUnknown as unknown:
                            raise ListAgain from unknown
                case _:
                    pass

        return deliver

    def _take(self, news: Sequence[object]) -> None:
        for one in news:
            match one:
                case m.GenerationPut() if one.generation.nodes and self._first(f"generation {one.generation.key}"):
                    self._seal(one.generation)
                case m.MemberPut() if self._first(f"member {one.record.node.id}"):
                    node = one.record.node
                    self._write("member.joined", node.name, incarnation=node.incarnation)
                case m.TombPut() if one.tomb.how in (Out.DEAD, Out.FAILED) and self._first(f"tomb {one.id}"):
                    by = one.tomb.by.partition("@")[0]
                    self._write("peer.lost", by, peer=one.id.partition("@")[0], evidence=one.tomb.detail)
                case _:
                    pass

    def _first(self, what: str) -> bool:
        with self._lock:
            first = what not in self._seen
            self._seen.add(what)
            return first

    def _seal(self, generation: Generation) -> None:
        with self._lock:
            self._generation, self._step = generation.number, 0
        nodes = [node.name for node in generation.nodes]
        self._write(
            "generation.sealed",
            generation.leader,
            generation=generation.number,
            number=generation.number,
            cause=generation.cause.value,
            nodes=nodes,
            spares=[node.name for node in generation.spares],
            layout={"dp": len(nodes) * self._cluster.launch.slots},
            leader=generation.leader,
            detail=generation.detail,
        )

    def _write(self, event: str, node: str, **fields: Any) -> None:
        check(event, fields)
        line = json.dumps({"event": event, "at": self._clock.wall(), "node": node, **fields})
        with self._lock:
            self._file.write(line + "\n")
