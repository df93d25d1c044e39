"""The benchmark that forms a world: what it prints, how it reports failures, and that it leaves nothing behind."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from chaos.bench import forming
from chaos.bench.cost import BASE, VARIANTS
from chaos.bench.forming import CONTENDERS, Contender, Results, install, tables
from chaos.bench.spread import spread
from chaos.bench.world import Formed
from elastic3d.calibration.script_question import ask
from tests.paths import ROOT

pytestmark = pytest.mark.long


def test_a_spread_is_the_median_with_its_extremes() -> None:
    """Repeats that failed are counted, not silently left out."""
    assert spread([3.0, 1.0, 2.0]) == "2.00 s (1.00 to 3.00)"
    assert spread([0.5, None], " %", 1) == "0.5 % (0.5 to 0.5), 1 of 2 never"
    assert spread([None, None]) == "none of 2"


def test_the_base_of_the_cost_trains_as_it_is_called() -> None:
    """The script hands its options on to `run.shard`; else the ordered reduction would be compared with itself."""
    answer = ask(str(ROOT / "chaos/scripts/train_gpt.py"), (*VARIANTS[BASE], "--width=32"), limit=120)
    assert BASE.startswith("fast")
    assert answer.profile.reduction == "fast"


def test_tables_show_figures_and_failures() -> None:
    """A world that failed shows its error, one that succeeded its figures; no cell is empty."""
    results: Results = {
        ("elastic3d", 4): [Formed(seconds=s, cpu=0.01, writes=12, record=600, server_cpu=0.02) for s in (0.1, 0.3)],
        ("c10d", 4): [Formed(failed="failed: agent 3 died"), Formed(seconds=1.0, cpu=0.02)],
        ("etcd-v2", 4): [Formed(failed="not available: no such package")],
        ("lighthouse", 4): [Formed(seconds=0.004)],
    }
    console = Console(file=io.StringIO(), width=200)
    for table in tables(results):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for figure in ("0.200 s (0.100 to 0.300)", "1.00 %", "1.000 s (1.000 to 1.000), 1 of 2 never", "3.00", "600 B"):
        assert figure in text
    assert "not available: no such package" in text


def test_a_package_that_cannot_be_installed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package index there is a reason and no figure."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert "python-etcd" in install(("python-etcd",), tmp_path / "target")


def test_a_world_with_a_failed_process_shows_its_error(tmp_path: Path) -> None:
    """The error stands in place of the figure."""
    nobody = Contender(system="nobody", title="nobody")
    assert forming.one_world(nobody, 4, tmp_path, idle=0.0).failed.startswith("failed: exit code 2")


@pytest.mark.etcd
def test_four_agents_form_a_world() -> None:
    """The whole measurement for elastic3d alone: ranks, a shared store, idle cost, writes, and no process left."""
    results = forming.measure([4], 1, CONTENDERS[:1], idle=0.5)
    (formed,) = results["elastic3d", 4]
    assert not formed.failed
    assert formed.seconds is not None
    assert formed.seconds > 0
    assert formed.cpu is not None
    # At least one key and one acknowledgement per agent; far fewer writes than one per pair.
    assert formed.writes is not None
    assert 2 * 4 <= formed.writes <= 8 * 4
    assert formed.record is not None
