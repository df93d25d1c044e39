"""The order of saves that DCP runs in the background: one after the other, as requested.

`async_save` lets the Writer copy the state in the caller's thread, and then saves the copy in a thread of its own, or
sends it from such a thread to a process. Threads begin in any order and run concurrently: the collectives of two saves
would mix, a planner given to both would save the tensors of one as the other's, and the older save could be the last to
move `latest`. So each copy takes a turn when it is made, and its thread begins when the earlier ones have ended.

A turn ends when its thread does, as torch's do after one save, whether it succeeded or not; or when that thread takes
another turn, or the copy is no longer referenced. A save without a copy (`dcp.save`) waits for the turns before it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, SupportsIndex

_LOOK = 0.1  # seconds between two checks whether a thread that lives on has taken another turn


class Turn:
    """One save in the background. alone: whether none was under way when it was requested."""

    def __init__(self, before: Turn | None) -> None:
        self.alone = before is None or before.over
        self._before = before
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def over(self) -> bool:
        """Return whether it and those before it have ended."""
        if self._before is not None and not self._before.over:
            return False
        self._before = None
        if self._ended.is_set():
            return True
        return self._thread is not None and not self._thread.is_alive()

    def begin(self) -> None:
        """Wait until those before it have ended; called by the thread that saves."""
        if self._thread is None:
            self._thread = threading.current_thread()
            self._begun.set()
        if self._before is not None:
            self._before.wait()

    def end(self) -> None:
        """Let the next one begin."""
        self._ended.set()
        self._begun.set()

    def wait(self) -> None:
        """Wait until it and those before it have ended."""
        if self._before is not None:
            self._before.wait()
        self._begun.wait()
        thread = self._thread
        if thread is threading.current_thread():
            return
        while thread is not None and thread.is_alive() and not self._ended.is_set():
            thread.join(_LOOK)


class Staged(dict[str, Any]):
    """A copy of a state dict whose turn begins when it is first read to be saved, or sent to another process."""

    def __init__(self, state: dict[str, Any], turns: Turns, turn: Turn) -> None:
        super().__init__(state)
        self._turns, self._turn = turns, turn
        weakref.finalize(self, turn.end).atexit = False

    def items(self) -> Any:
        """Return the entries once it is this save's turn."""
        self._turns.begin(self._turn)
        return super().items()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle as a plain dict once it is this save's turn: torch sends it from the thread that waits for the save.

        So saves in another process also come one after the other, and no two of them wait for the same answer.
        """
        self._turns.begin(self._turn)
        return dict, (dict(self),)


class Turns:
    """The turns of one Writer, in one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = threading.current_thread()
        self._last: Turn | None = None
        self._here = threading.local()

    def take(self) -> Turn:
        """Return the next turn."""
        self._leave()
        with self._lock:
            self._last = turn = Turn(self._last)
        return turn

    def begin(self, turn: Turn) -> None:
        """Wait for a turn, and take it in this thread."""
        if self._here_is() is not turn:
            self._leave()
            self._here.turn, self._here.entered = turn, False
        turn.begin()

    def enter(self) -> bool:
        """Wait until this thread may save; return whether no other save was under way when this one was requested.

        If a save has no turn and is not made by the thread that made the Writer, it is unknown when it was requested:
        False is the careful answer.
        """
        turn = self._here_is()
        if turn is not None and not self._here.entered:
            self._here.entered = True
            return turn.alone
        self._leave()
        with self._lock:
            last = self._last
        alone = last is None or last.over
        if last is not None:
            last.wait()
        return alone and threading.current_thread() is self._owner

    def _here_is(self) -> Turn | None:
        turn: Turn | None = getattr(self._here, "turn", None)
        return turn

    def _leave(self) -> None:
        """End the turn of this thread, which is now doing something else."""
        turn = self._here_is()
        if turn is not None:
            turn.end()
        self._here.turn = None
