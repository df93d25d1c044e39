"""What torch says of a data loader's process that was killed, in the trainer that its samples are for.

Its handler of SIGCHLD raises wherever the trainer's main thread is; an error of the loader's own may come of that.
"""

from __future__ import annotations

import re
import signal

_SAID = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([^.]+)\.")


def killed_by(error: BaseException) -> int:
    """Return the number of the signal that killed a loader's process, if that is why this was raised, and else 0."""
    seen: BaseException | None = error
    chain: list[BaseException] = []
    while seen is not None and seen not in chain:
        chain.append(seen)
        said = _SAID.search(str(seen)) if isinstance(seen, RuntimeError) else None
        if said is not None:
            return next((one for one in signal.valid_signals() if signal.strsignal(one) == said[1]), 0)
        seen = seen.__cause__ or seen.__context__
    return 0
