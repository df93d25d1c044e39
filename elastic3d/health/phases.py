"""What a trainer may be at, and the axes on which ranks wait for each other: the words of every progress record.

The numbers are those of the shared page (`health/record`), and stay what they are; other processes see the names.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a rank is at."""

    START = 0  # building its model, before it waits for its keeper
    RESTORE = 1  # getting its state, and what follows until the first batch
    DATA = 2  # waiting for its data loader
    FORWARD = 3
    BACKWARD = 4
    REDUCE = 5  # gradients between the last backward pass and the update
    VOTE = 6
    UPDATE = 7  # the optimizer's step
    COPY = 8  # waiting for the copy of its snapshot
    USER = 9  # the script's own code between steps
    PAUSE = 10  # within `run.pause`
    LEAVE = 11  # its last step is made
    WEIGHTS = 12  # the part of a backward pass over the weights, where the schedule gives it a time of its own


class Axis(IntEnum):
    """Where ranks meet. On all but the four of pipelines a rank waits for those of its group that have posted fewer.

    Pipelines send and receive between neighbours in the order of pp, the last one's next being the first (with two
    stages: rank 0's next is rank 1, rank 1's previous is rank 0). The n-th receive from the previous rank waits for
    its n-th send to the next one, and so in the other direction.
    """

    WORLD = 0
    DP = 1
    SHARD = 2
    REPLICA = 3
    TP = 4
    USER = 5  # collectives of the script's own
    TO_NEXT = 6
    FROM_PREVIOUS = 7
    TO_PREVIOUS = 8
    FROM_NEXT = 9
    CP = 10
