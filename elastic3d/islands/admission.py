"""How an island becomes one of the set: it asks in the store, and an outer step's record answers. Rank 0's part."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from elastic3d.errors import StateError, UsageError
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.options import Islands
from elastic3d.islands.record import Sealed, first, following, label, name_and_number, newest
from elastic3d.log import process_log
from elastic3d.quantities import seconds


@dataclass(slots=True)
class Admission:
    """Asks for one island. token: tells its job from another one of the same name."""

    exchange: Exchange
    islands: Islands
    name: str
    token: str
    island: str = ""
    announced: bool = False

    def ask(self, after: int = 0) -> str:
        """Ask under a new number, or go on with what this job had asked for before it died; return the island.

        after: the number under which it was a member before, 0 for none.
        """
        number = newest(self.exchange.joined()).get(self.name, 0)
        if number > after and self.exchange.token_of(label(self.name, number)) == self.token:
            record, self.island = self.exchange.newest(), label(self.name, number)
            if record is None or number > record.known.get(self.name, 0) or self.island in record.admitted:
                return self.island
        while True:
            number += 1
            if self.exchange.join(label(self.name, number), self.token):
                self.island = label(self.name, number)
                return self.island

    def look(self, waited: float) -> Sealed | None:
        """Return the record that has this island among its members, None while there is none.

        UsageError where the name is another island's; StateError after `longest`.
        """
        record = self.exchange.newest()
        joined = self.exchange.joined()
        self._check_name(record, joined)
        if record is not None and self.island in record.members:
            return record
        left = self.exchange.left()
        if record is None:
            waiting = [one for one in joined if one not in left]
            if len(newest(waiting)) >= self.islands.minimum:
                return self._among(self.exchange.seal(first(joined, left, by=self.island)))
            why = f"{len(newest(waiting))} of at least {self.islands.minimum} islands are there (minimum=)"
        elif not set(record.members) - left:
            # Nobody is left to seal an outer step: the run goes on from the last one.
            return self._among(self.exchange.seal(following(record, {}, joined=joined, left=left, by=self.island)))
        else:
            why = f"the outer step after {record.outer} admits it; {', '.join(sorted(record.members))} train"
        if waited > seconds(self.islands.longest, "longest"):
            raise StateError(
                f"island {self.island} was not admitted for {waited:.0f} s (Islands(longest=)): {why}. Trying again "
                "helps where the others come; `elastic3d islands show` says who is there, and `elastic3d islands "
                "leave` has those given up that will not come back"
            )
        if not self.announced and waited > 1.0:
            self.announced = True
            process_log().emit("island.waiting", why="admission", detail=why)
        return None

    def _among(self, record: Sealed) -> Sealed | None:
        return record if self.island in record.members else None

    def _check_name(self, record: Sealed | None, joined: Iterable[str]) -> None:
        """Raise UsageError where another job has the name."""
        number, mine = newest(joined)[self.name], name_and_number(self.island)[1]
        if number > mine and self.exchange.token_of(label(self.name, number)) != self.token:
            self._refuse(f"another job has joined as {label(self.name, number)}")
        if record is None or record.known.get(self.name, 0) < mine or self.island in record.members:
            return
        if self.island in record.refused:
            self._refuse(f"an island of that name is alive: it was merged at outer step {record.outer}")
        # It was admitted, and an outer step was sealed without it before it looked.
        self.ask(after=mine)

    def _refuse(self, why: str) -> None:
        raise UsageError(
            f"elastic3d.Islands(name={self.name!r}): {why}. Trying again does not help while it is: each island needs "
            "a name of its own, by default the rendezvous id of its job"
        )


def new_token() -> str:
    """Return what tells this job from others."""
    return secrets.token_hex(8)
