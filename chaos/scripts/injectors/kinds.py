"""All kinds of faults of the script, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from chaos.scripts.injectors import astray, custody, memory, samples, standstill
from chaos.scripts.injectors.fault import LEADER, NEWCOMER, Fault
from chaos.scripts.injectors.injector import Injector, Where

KINDS: Mapping[str, Injector] = {
    "stop": Injector(inject=standstill.stop),
    "gil": Injector(inject=standstill.hold),
    "lock": Injector(inject=standstill.lock),
    "blocked": Injector(inject=standstill.blocked),
    "unkillable": Injector(inject=standstill.unkillable),
    "blackhole": Injector(inject=standstill.blackhole),
    "spin": Injector(inject=standstill.spin),
    "loader": Injector(where=Where.DATA, inject=samples.loader),
    "stall": Injector(where=Where.DATA, inject=samples.stall),
    "nodata": Injector(where=Where.SAMPLE, inject=samples.no_data),
    "raise": Injector(inject=astray.fail),
    "raise-everywhere": Injector(inject=astray.fail, again=True, everyone=True),
    "raise-on-node": Injector(inject=astray.fail, again=True, stays=True),
    "raise-final": Injector(inject=astray.misuse),
    "skip": Injector(inject=astray.skip),
    "order": Injector(inject=astray.order),
    "shape": Injector(inject=astray.shape),
    "dtype": Injector(inject=astray.dtype),
    "deadlock": Injector(where=Where.ALL, inject=astray.deadlock),
    "flip": Injector(where=Where.BLOCK, wrong="weight"),
    "forward": Injector(where=Where.BLOCK, wrong="output"),
    "backward": Injector(where=Where.BLOCK, wrong="input"),
    "sticky": Injector(where=Where.BLOCK, wrong="weight", sticky=True),
    "liars": Injector(where=Where.BLOCK, wrong="weight", sticky=True, second=True),
    "nandevice": Injector(where=Where.BLOCK, wrong="nan", sticky=True),
    "rest": Injector(inject=memory.rest),
    "memory": Injector(inject=memory.short),
    "devicememory": Injector(where=Where.BLOCK, wrong="memory"),
    "vote": Injector(inject=custody.vote),
    "update": Injector(inject=custody.update),
    "updates": Injector(inject=custody.updates),
    "wire": Injector(inject=custody.wire),
    "fold": Injector(inject=custody.fold),
    "gather": Injector(where=Where.BLOCK, wrong="gathered"),
    "nan": Injector(where=Where.SAMPLES),
    "spike": Injector(where=Where.SAMPLES),
    "slow": Injector(where=Where.ON),
    "sluggish": Injector(where=Where.ON),
}

_NAMED = {"leader": LEADER, "newcomer": NEWCOMER}


def parse(text: str, out: Path) -> Fault:
    """Return the fault that KIND:RANK@STEP[:MB[:BLOCK]] asks for; ValueError where it is not one."""
    match = re.fullmatch(r"([a-z-]+):(\d+|leader|newcomer)@(\d+)(?::(\d+(?:\.\d+)?))?(?::(\d+))?", text)
    if match is None or match[1] not in KINDS:
        raise ValueError(f"--fault {text!r}: expected KIND:RANK@STEP[:MB[:BLOCK]], KIND one of {', '.join(KINDS)}")
    last = float(match[4] or 0)
    return Fault(
        kind=match[1],
        injector=KINDS[match[1]],
        of=_NAMED[match[2]] if match[2] in _NAMED else int(match[2]),
        step=int(match[3]),
        micro_batch=int(last),
        block=int(match[5] or 0),
        factor=last,
        out=out,
    )
