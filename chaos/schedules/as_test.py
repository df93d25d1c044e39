"""A schedule that failed as a test, ready to be put beside the others that play schedules."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from chaos.schedules.files import to_toml
from chaos.schedules.schedule import Schedule
from chaos.storms.storm import Job

_SCRIPTS = Path(__file__).parents[1] / "scripts"
_TEXT = '''\
"""A schedule under which a promise was broken: {promise}."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from rich.console import Console

{imports}from chaos.schedules.files import parse
from chaos.storms.storm import Job, play_storm

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.long, pytest.mark.timeout(600)]

JOB = Job(
    script={script},
    arguments={arguments},
    nodes={nodes},
    slots={slots},
    seed={seed},
    conf={conf},
    patience={patience},
    bars={bars},
    recovery={recovery},
    loopback={loopback},
    tolerance={tolerance},
    step_pattern={step_pattern},
)
SCHEDULE = """
{schedule}"""


def test_found_{name}(tmp_path: Path) -> None:
    """Every promise holds, of a job to which this happens."""
    schedule = parse(tomllib.loads(SCHEDULE), "schedule", nodes=JOB.nodes)
    storm = play_storm(schedule, JOB, workdir=tmp_path / "work", kept=tmp_path, console=Console(stderr=True))
    assert storm.kept, "\\n".join(storm.verdict.told)
    if storm.skipped:
        pytest.skip("\\n".join(f"{{fault}}: {{why}}" for fault, why in storm.skipped))
'''


def as_test(schedule: Schedule, job: Job, *, name: str, promise: str) -> str:
    """Return the module. name: of digits and underscores. promise: the one that was broken."""
    ours = Path(job.script).parent == _SCRIPTS
    script = f'str(Path(chaos.__file__).parent / "scripts" / {_quoted(Path(job.script).name)})'
    return _TEXT.format(
        promise=promise.replace("\\", "/").replace('"', "'"),
        imports="import chaos\n" if ours else "",
        script=script if ours else _quoted(job.script),
        arguments=_listed(map(_quoted, job.arguments), "()"),
        nodes=job.nodes,
        slots=job.slots,
        seed=job.seed,
        conf=_listed((f"{_quoted(key)}: {_quoted(value)}" for key, value in job.conf.items()), "{}"),
        patience=float(job.patience),
        bars=job.bars,
        recovery=job.recovery,
        loopback=job.loopback,
        tolerance=job.tolerance,
        step_pattern=_quoted(job.step_pattern),
        schedule=to_toml(schedule),
        name=name,
    )


def _quoted(text: str) -> str:
    """Return it as formatters write it: in double quotes, unless it has some itself."""
    return repr(text) if '"' in text else json.dumps(text, ensure_ascii=False)


def _listed(items: Iterable[str], braces: str) -> str:
    """Return items one a line, as formatters leave them."""
    lines = [f"        {item},\n" for item in items]
    return f"{braces[0]}\n{''.join(lines)}    {braces[1]}" if lines else braces
