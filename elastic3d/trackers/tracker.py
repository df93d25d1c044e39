"""What a tracker does: the public interface for those that are not built in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple


class Position(NamedTuple):
    """The newest point that a tracker's storage has.

    generation: what its values gave as "generation", 0 if the storage cannot tell; it says whether the step was made
    before or after the run went back.
    """

    step: int
    generation: int = 0


class Tracker(ABC):
    """Writes the curves of a run to one place: `trackers=` of `elastic3d.run`.

    The object is made in every process of the job. Only the one that writes calls it, from `open` on, on a thread of
    its own, one method at a time. Any exception makes elastic3d call `close`, wait, and begin with `open` again; so
    what `write` was given counts as written only when `flush` has returned. Training never waits for any of this.
    """

    @abstractmethod
    def open(self, run_id: str, config: Mapping[str, str | int]) -> Position | None:
        """Begin to write, and return the newest point that is there already, None where there is none.

        Called when the run begins, when another node has written before, and after an error. Points are written with
        rising steps, so that all those up to the newest are taken to be there; incomplete ones must be removed here.

        Args:
            run_id: The id of the job, as torchrun's `--rdzv-id` gives it.
            config: What is known of the run: "run", "node", "generation", "nodes", "ranks" and "layout".
        """

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Write one point.

        Args:
            step: The number of updates made, this one included; higher than that of the point before.
            values: Such as "loss" and "generation"; not all of them need be finite.
            at: When this node heard of it, in seconds since 1970.
        """

    @property
    def every(self) -> float:
        """Seconds from one `flush` to the next, 1 by default: so much is written late if this node dies."""
        return 1.0

    def flush(self) -> None:  # noqa: B027  # nothing is to be done where `write` does it all
        """Return when a new `open`, here or on another node, would see what was written."""

    def rewind(self, step: int) -> bool:
        """Remove all points after `step`, since the run went back; they are then written again, with other values.

        Return False, as the default does, where the storage cannot forget: it will have both. 0 says that another run
        has begun.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Write no more. Also called after an error, and when another node writes from now on."""
