"""Whether a node still has to prove that it computes rightly: what its keeper knows when a generation is prepared."""

from __future__ import annotations

from elastic3d.port import StepRecord


class Standing:
    """A node is a newcomer until it has passed an exam, or agreed with others in an audit, and after each absence.

    To have made steps is not enough: who trained alone has never been compared with anybody.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._proved = False
        self._clean = -1

    def newcomer(self, generation: int) -> bool:
        """Return whether the node has anything to prove before the first step of a generation."""
        return not self._proved or generation > self._generation + 1

    def began(self, generation: int) -> None:
        """Take note that a generation with this node begins."""
        self._proved = not self.newcomer(generation)
        self._generation, self._clean = generation, -1

    def examined(self, generation: int) -> None:
        """Take note that all agreed in the exam of a generation."""
        self._proved |= generation == self._generation

    def stepped(self, record: StepRecord) -> None:
        """Take note of a step: audits vouch for more than at the first one of the generation once this node agreed."""
        if record.generation == self._generation:
            self._proved |= 0 <= self._clean < record.clean
            self._clean = record.clean if self._clean < 0 else self._clean
