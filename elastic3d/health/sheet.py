"""One rank's steps in numbers, and how they reach everybody: fourteen numbers that ride in the step vote.

Steps are summed up by eights: those up to a multiple of `EVERY` make a row of means. During the next eight steps each
vote carries the rows of every eighth rank, so that the vote of every step has the same size, is hardly longer, and all
rows that are compared are of the same steps. Every rank hears every row, and so does every node's keeper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from elastic3d.health.phases import Axis, Phase

EVERY = 8
"""Steps of a row, and votes until all ranks' rows are there."""

WIDTH = 14
"""Numbers of a row."""

SHEETS, SHEET_WORDS = 64, 24
"""How many steps a trainer's page has the numbers of, and words for each."""

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSheet:
    """Means over the steps of a row, in seconds a step where nothing else is said. All waits are left out of the rest.

    work: parameters of the rank's stages, not divided by the ranks that share them. rounds: forward passes of a stage.
    forward, backward, weights: the passes, `weights` where the schedule gives those over the weights a time of their
    own. data: for the loader. update: gradients between the passes and the vote, the vote's own numbers, and the
    optimizer's step. host: the script's own code between steps. copy: for the copy of a snapshot. wait_dp, wait_pp,
    wait_other: for other ranks, along the data-parallel axes, the pipeline, and the rest. block: not of a step, but of
    one forward pass of one block, in stages of several; 0.0 where blocks are not alike, and in a layout of one stage.
    read: bytes from object storage that the samples of a step were made of.
    """

    work: float
    rounds: float
    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    data: float = 0.0
    update: float = 0.0
    host: float = 0.0
    copy: float = 0.0
    wait_dp: float = 0.0
    wait_pp: float = 0.0
    wait_other: float = 0.0
    block: float = 0.0
    read: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds of computing the passes."""
        return self.forward + self.backward + self.weights

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        own = self.busy + self.data + self.update + self.host + self.copy
        return own + self.wait_dp + self.wait_pp + self.wait_other

    @property
    def row(self) -> Row:
        """The numbers as they ride in the vote."""
        return astuple(self)


def is_row(row: Sequence[float]) -> bool:
    """Whether a rank has written it; all zeros ride in the vote where it has not."""
    return len(row) == WIDTH and row[1] > 0 and row[2] + row[3] + row[4] > 0


def sheet_of(row: Sequence[float]) -> StepSheet | None:
    """Return what a row says; None where the rank has none: its first steps, or no record."""
    if not is_row(row):
        return None
    return StepSheet(**dict(zip(StepSheet.__slots__, row, strict=True)))


def speaks(rank: int, step: int) -> bool:
    """Whether a rank's row rides in the vote on the `step`-th step."""
    return rank % EVERY == step % EVERY


def speakers(step: int, world: int) -> range:
    """Return the ranks whose rows ride in the vote on the `step`-th step, in the order of their rows."""
    return range(step % EVERY, world, EVERY)


def places(world: int) -> int:
    """Return how many rows a vote has room for."""
    return -(-world // EVERY)


_PHASES = (
    Phase.DATA,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.WEIGHTS,
    Phase.REDUCE,
    Phase.VOTE,
    Phase.UPDATE,
    Phase.COPY,
    Phase.USER,
    Phase.PAUSE,
)
"""Those that a page has, in this order; they end one word before the step's: the rest are waits."""


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """What one step of a rank goes into, while it is added up. All times are nanoseconds.

    rounds: forward passes of a stage. spent: by phase, without waits. waited: by axis. blocks: of the forward phase's
    part within blocks, without waits. passes: how many blocks these were. read: bytes that its samples were made of.
    """

    rounds: int = 0
    spent: list[int] = field(default_factory=lambda: [0] * len(Phase))
    waited: list[int] = field(default_factory=lambda: [0] * len(Axis))
    blocks: int = 0
    passes: int = 0
    read: int = 0


class SheetWriter:
    """One rank's end: writes each step into its page, and sums up the rows.

    words: `SHEETS` times `SHEET_WORDS` of the page. row: the newest, without its first number; () for none. behind: by
    how many steps the steps of a row are those before, because they are known so much later.
    """

    def __init__(self, words: memoryview) -> None:
        self.row: Row = ()
        self.behind = 0
        self._words = words
        self._sums, self._steps = [0] * WIDTH, 0

    def stepped(self, step: int, at: int, times: StepTimes, *, fresh: bool) -> None:
        """Take note of a step.

        at: when it ended. fresh: the last eight steps are not all like those to come: some compile and connect.
        """
        words, place, spent, waited = self._words, step % SHEETS * SHEET_WORDS, times.spent, times.waited
        words[place + 1], words[place + 2] = at, times.rounds
        for number, phase in enumerate(_PHASES, start=place + 3):
            words[number] = spent[phase]
        for number, time in enumerate(waited, start=place + 3 + len(_PHASES)):
            words[number] = time
        words[place] = step + 1
        dp = waited[Axis.DP] + waited[Axis.SHARD] + waited[Axis.REPLICA]
        pp = sum(waited[Axis.TO_NEXT : Axis.FROM_NEXT + 1])
        numbers = (
            times.read,
            times.passes,
            times.blocks,
            times.rounds,
            spent[Phase.FORWARD],
            spent[Phase.BACKWARD],
            spent[Phase.WEIGHTS],
            spent[Phase.DATA],
            spent[Phase.REDUCE] + spent[Phase.VOTE] + spent[Phase.UPDATE],
            spent[Phase.USER],
            spent[Phase.COPY],
            dp,
            pp,
            sum(waited) - dp - pp,
        )
        self._sums = [a + b for a, b in zip(self._sums, numbers, strict=True)]
        self._steps += 1
        if (step + self.behind) % EVERY == 0:
            read, passes, blocks, rounds, *seconds = self._sums
            whole = self._steps == EVERY and not fresh
            block = blocks / max(1, passes) / 1e9
            means = (time / EVERY / 1e9 for time in seconds)
            self.row = (rounds / EVERY, *means, block, read / EVERY) if whole else ()
            self._sums, self._steps = [0] * len(self._sums), 0


def steps_of(words: Sequence[int]) -> list[tuple[int, dict[str, int]]]:
    """Return what a page's words say: the steps it has, oldest first, each with its numbers by name."""
    steps = []
    for place in range(0, SHEETS * SHEET_WORDS, SHEET_WORDS):
        step, at, rounds, *times = words[place : place + SHEET_WORDS]
        if step:
            named = {"at": at, "rounds": rounds}
            named |= {phase.name.lower(): time for phase, time in zip(_PHASES, times, strict=False)}
            named |= {
                f"wait_{axis.name.lower()}": time for axis, time in zip(Axis, times[len(_PHASES) :], strict=False)
            }
            steps.append((step - 1, named))
    return sorted(steps, key=lambda one: one[0])
