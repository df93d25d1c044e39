"""One stage's process: `python -m chaos.gpu.stage NAME DEVICE SIZE DEADLINE DEVICE-NAME ETCD`.

The deadline is of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import importlib
import os
import sys

from chaos.gpu.bench import Bench
from chaos.gpu.catalogue import chosen


def main() -> None:
    """Run it. Its lines are all that comes out of standard output: whatever else is printed goes to the log."""
    name, device, size, deadline, device_name, etcd = sys.argv[1:]
    lines = os.dup(1)
    os.dup2(2, 1)
    (stage,) = chosen(name)
    bench = Bench(
        stage=name,
        kind=device,
        small=size == "small",
        deadline=float(deadline),
        name=device_name,
        etcd=etcd,
        lines=lines,
    )
    importlib.import_module(f"chaos.gpu.{stage.module}").measure(bench)
    sys.stdout.flush()
    # Contexts and process groups are left to the kernel, as trainers leave theirs.
    os._exit(0)


if __name__ == "__main__":
    main()
