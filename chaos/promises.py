"""Which promise a text of the judge says is broken: two runs fail alike where it is the same one."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PROMISES = (
    (r"nothing happened for|ended before its joiners", "the job goes on until its end"),
    (r"its moment never came$", "every fault finds its moment"),
    (r"^left behind: ", "nothing is left behind"),
    (r"^user code raised: ", "the script raises nothing"),
    (r"^generation \d+ .* was planned, and repeated", "a planned change repeats no step"),
    (r"with other bits$|^loss of step|^digest|consumed other samples|steps, undisturbed", "the same bits"),
    (r"samples missing, ", "every sample once"),
    (r"is no checkpoint; ", "the last step is saved"),
    (r"^the job ended after step|left no digest$", "the job makes all its steps"),
    (r" ended with (no exit code|exit code)", "every node ends without an error"),
)
"""What the judge's texts look like, the most telling first: a job that hangs breaks most others, too."""


def promise_of(broken: str) -> str:
    """Return the promise that a broken one's text is about, without its numbers and names; the text if it is none."""
    return next((promise for pattern, promise in _PROMISES if re.search(pattern, broken)), broken)


def first_promise(broken: Sequence[str]) -> str:
    """Return the most telling of the promises that were broken; "" for none."""
    order = {promise: number for number, (_, promise) in enumerate(_PROMISES)}
    return min(map(promise_of, broken), key=lambda promise: order.get(promise, -1), default="")
