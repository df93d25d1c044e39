"""Actors that take turns at store operations: each a thread, and never two of them at once.

An actor runs until its next store operation, or waits for something. The scheduler then chooses who continues
and for how many operations, so that an interleaving is a list of (actor, turns).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Body = Callable[[], None]


class Killed(BaseException):
    """The actor's process was killed: raised out of its store operation, and out of every later one."""


class Actor:
    """One process. `body` is run again, as a new process, as often as `lives` allow after it was killed."""

    def __init__(self, name: str, body: Body, *, lives: int = 1) -> None:
        self.name = name
        self.over = False
        self.dead = False
        self.lives = lives
        self.error: BaseException | None = None
        self._body = body
        self._wanted: Callable[[], bool] | None = None
        self._turns = 0
        self._through = self._before = ""
        self._ended = False
        # Held locks: releasing one gives the turn to the other.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        """Whether it would use a turn."""
        return not self.over and (self._wanted is None or self._wanted())

    def run(self, turns: int, *, through: str = "", before: str = "") -> None:
        """Let it do so many store operations; fewer when it waits, dies or is done. Called by the scheduler.

        It stops once it has done one of the kind `through`, or is about to do one of the kind `before`.
        """
        if self.over:
            return
        self._turns, self._through, self._before = turns, through, before
        if self._thread is None:
            self._thread = threading.Thread(target=self._live, name=self.name, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()

    def end(self) -> None:
        """Unwind its thread; nothing it does meanwhile has an effect."""
        self._ended = self.dead = True
        if self._thread is not None and not self.over:
            self._go.release()
            self._back.acquire()
        self.over = True

    def turn(self, kind: str) -> bool:
        """Take one turn, in the actor's thread, waiting for it if need be; return whether it is the last one given."""
        self._mind()
        while self._turns == 0 or kind == self._before:
            self._hand_over()
        self._turns = 0 if kind == self._through else self._turns - 1
        return self._turns == 0

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until `until` holds, without using up turns. It must not change anything."""
        self._mind()
        while not until():
            self._wanted = until
            self._turns = 0
            self._hand_over()
        self._wanted = None

    def die(self) -> None:
        """Raise Killed, now and at every later turn of this life."""
        self.dead = True
        raise Killed(self.name)

    def _mind(self) -> None:
        if self.dead:
            raise Killed(self.name)

    def _hand_over(self) -> None:
        self._back.release()
        self._go.acquire()
        self._mind()

    def _live(self) -> None:
        try:
            while True:
                try:
                    self._body()
                except Killed:
                    self.lives -= 1
                    if self._ended or self.lives <= 0:
                        return
                    self.dead = False
                    self._wanted = None
                    continue
                return
        except BaseException as error:  # noqa: BLE001 (a thread's edge: the scheduler reports it)
            self.error = error
        finally:
            self.over = True
            self._back.release()
