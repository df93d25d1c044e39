"""What a soak leaves: a plot that is an SVG document, the document with all samples, and the exit."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chaos.commands.app import app
from chaos.faults.moment import When
from chaos.faults.process import Kill
from chaos.growth.account import Known
from chaos.growth.measures import MB, measures
from chaos.growth.plot import growth_plot, nice
from chaos.growth.report import document, keep, passed, shown
from chaos.growth.sampling import Sample
from chaos.growth.soak import Plan, Soak
from elastic3d.values import from_json
from tests.chaos.growth.test_sampling import samples

SVG = "{http://www.w3.org/2000/svg}"


def made_up(leak: float = 0.0) -> Soak:
    return Soak(
        plan=Plan(seconds=1200.0),
        samples=tuple(samples(leak)),
        made=((Kill(node="node1", when=When(step=20)), 30.0),),
        broken=(),
        seconds=1200.0,
        steps=2400,
        generations={1: Known(cause="start", repeated=0), 2: Known(cause="death", repeated=1)},
    )


def test_the_plot_has_a_panel_for_each_group() -> None:
    """With a curve for each series, and what grows in red."""
    found = measures(samples(MB))
    root = ElementTree.fromstring(growth_plot("A <soak>", found))
    assert len(root.findall(f"{SVG}g")) == len({measure.group for measure in found})
    assert len(list(root.iter(f"{SVG}polyline"))) == len(found)
    red = [text.text for text in root.iter(f"{SVG}text") if text.get("fill") == "#c0392b"]
    assert red == ["node0 keeper grows"]
    ElementTree.fromstring(growth_plot("nothing", ()))


@pytest.mark.parametrize(("most", "top"), [(0, 1), (3, 3.2), (99, 100), (0.07, 0.08), (1000, 1000), (1001, 1200)])
def test_scales_end_at_round_numbers(most: float, top: float) -> None:
    """At or above the largest value."""
    assert nice(most) == pytest.approx(top)


def test_what_is_kept_has_all_samples(tmp_path: Path) -> None:
    """The same values as were measured; the second soak of a seed has a folder of its own."""
    soak = made_up(MB)
    folder = keep(soak, tmp_path / "out", tmp_path)
    kept = json.loads((folder / "growth.json").read_text())
    assert kept["grows"] == ["memory of lasting processes: node0 keeper"]
    assert [from_json(Sample, one) for one in kept["samples"]] == list(soak.samples)
    assert keep(soak, tmp_path / "out", tmp_path).name == "soak-7.2"


def test_growth_and_broken_promises_are_failures() -> None:
    """And said in words."""
    calm, leaking = made_up(), made_up(MB)
    broken = replace(calm, broken=("step 3 was done again with other bits",))
    assert [passed(soak, measures(soak.samples)) for soak in (calm, leaking, broken)] == [True, False, False]
    console = Console(file=io.StringIO(), width=160)
    for soak in (calm, leaking, broken, replace(calm, interrupted=2)):
        console.print(shown(soak, measures(soak.samples)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "nothing grows, and every promise held" in text
    assert "nothing grows, and what was promised was not judged, since it was interrupted" in text
    assert "grows: memory of lasting processes: node0 keeper" in text
    assert "step 3 was done again with other bits" in text
    assert json.dumps(document(broken, measures(broken.samples)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give how long"),
        (["--minutes", "1", "--faults", "kil"], "did you mean 'kill'"),
        (["--minutes", "1", "--faults", "join"], "give another fault as well"),
        (["--minutes", "1", "--nodes", "1"], "the first node is never lost"),
        (["--minutes", "1", "--every", "soon"], "--every"),
        (["--minutes", "1", "--script", "none.py"], "there is no such file"),
        (["--minutes", "1", "--", "--steps=3"], "give it by --script"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    """With exit code 2, and what to do."""
    result = CliRunner().invoke(app, ["soak", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
