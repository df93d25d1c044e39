"""What `elastic3d explain` says about numbers, devices and state: tests/testdata/explain/*.txt.

`pytest tests/cli/explain --rewrite-displays` writes the present output; a person reviews the diff.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic3d.cli import application
from elastic3d.health.evidence import STALLS, VERDICT
from elastic3d.health.hearing import Compared
from elastic3d.health.meanings import EXCHANGED, MEANINGS
from elastic3d.health.trouble import Trouble, explain_trouble, newest, trouble_page
from elastic3d.log import EVENTS
from elastic3d.membership import events as m
from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.port import Audited, AuditReport, StepRecord
from elastic3d.rollback import Rollback
from elastic3d.values import Cause, Generation, Layout, Node, Slot, to_json
from elastic3d.worker.journal import Journal
from elastic3d.worker.processes import events as w
from tests.paths import DATA

PAGES = DATA / "explain"
WELL = StepRecord(
    generation=4,
    step=121,
    loss=2.0,
    gradient_norm=None,
    seconds=0.5,
    safe_step=120,
    etcd_away_everywhere=False,
    samples=(1440, 1452),
    sample_sum=9,
)
WHO = {"ranks": (1,), "nodes": ("n1",)}
WHERE = {"step": 120, "micro_batch": 3, "where": "the gradient of block 2"}
DETAIL = "rank 1 came to other bits than ranks 0 and 2, twice"
LINK = "what was sent from rank 0 to rank 1 arrived as something else"


def exchanged(
    compared: Compared, where: str, *nodes: str, detail: str = LINK, step: int = 120, kind: Audited = Audited.FAILED
) -> AuditReport:
    """Return what an audit says of what ranks exchange; each node has one rank of its number."""
    ranks = tuple(int(node[1:]) for node in nodes)
    about = {"step": step, "compared": str(compared), "where": where, "finding": "transient", "detail": detail}
    return AuditReport(kind=kind, ranks=ranks, nodes=nodes, **about)


SCENES: dict[str, Sequence[StepRecord | AuditReport]] = {
    "samples": (
        replace(WELL, step=100, excluded=((1200, 1202),), why_excluded="step 99: the loss of micro-batch 6"),
        replace(WELL, step=101, excluded=((1212, 1224),), why_excluded=""),
        replace(
            WELL,
            excluded=((1442, 1444), (1448, 1450)),
            why_excluded="step 120: the loss or the gradient of micro-batch 1, 4 is not finite, of samples 7, 33, 60, "
            "11: ranks of 2 columns, each by itself, came to the same",
        ),
    ),
    "spike": (replace(WELL, loss=9.5, usual=2.1),),
    "spike-kept": (
        replace(
            WELL, loss=9.5, usual=2.1, why_kept="only reported: the run went back 3 times within 10000 steps already"
        ),
    ),
    "rollback": (
        AuditReport(
            kind=Audited.SPIKED,
            step=120,
            clean=20,
            rollback=Rollback(before=5, step=21, spike=120, first=252, stop=1452),
            detail="the loss of step 120 is 9.5, where 2.1 was usual: the run goes back to the state of step 20, and "
            "leaves out steps 21 to 120, positions 252 to 1451",
        ),
    ),
    "accident": (
        AuditReport(kind=Audited.FAILED, finding="transient", detail=DETAIL, **WHERE, **WHO),
        AuditReport(kind=Audited.REDONE, step=120, nodes=("n1",), detail=DETAIL),
    ),
    "lying": (
        AuditReport(kind=Audited.FAILED, finding="transient", detail=DETAIL, **WHO, **WHERE | {"step": 80}),
        AuditReport(kind=Audited.FAILED, finding="persistent", detail=DETAIL, **WHERE, **WHO),
        AuditReport(kind=Audited.LYING, clean=95, detail=DETAIL, **WHERE, **WHO),
    ),
    "inconclusive": (
        AuditReport(kind=Audited.INCONCLUSIVE, finding="undecided", detail="two nodes differ again", **WHERE),
    ),
    "exam": (
        AuditReport(kind=Audited.UNFIT, finding="persistent", detail=DETAIL, **WHERE, **WHO),
        AuditReport(kind=Audited.LYING, detail=f"before the first step of this generation, {DETAIL}", **WHERE, **WHO),
    ),
    "piece": (
        exchanged(Compared.TRANSIT, "a piece of a gradient from rank 0 to rank 1", "n0", "n1"),
        AuditReport(kind=Audited.REDONE, step=120, nodes=("n0", "n1"), detail=LINK),
    ),
    "weight": (exchanged(Compared.WEIGHTS, "the weights of blocks.2 that rank 1 has gathered from rank 0", "n1"),),
    "sum": (exchanged(Compared.SUM, "the sum of gradients that rank 1 has added up", "n1", detail=DETAIL),),
    "link": (
        exchanged(Compared.TRANSIT, "a piece of a gradient from rank 0 to rank 1", "n0", "n1", step=80),
        exchanged(
            Compared.TRANSIT,
            "a piece of a gradient from rank 1 to rank 2",
            "n1",
            kind=Audited.LYING,
            detail=f"{LINK}, the second time within an hour, and n1 is an end of every link that failed",
        ),
    ),
    "rest": (AuditReport(kind=Audited.ALTERED, step=120, where="head.weight", detail="4 bits of head.weight", **WHO),),
    "update": (
        AuditReport(kind=Audited.MISCALCULATED, step=120, finding="persistent", acted=False, detail=DETAIL, **WHO),
    ),
    "vote": (AuditReport(kind=Audited.SPLIT, step=120, detail="rank 1 says another outcome", **WHO),),
}


def written(folder: Path, told: Sequence[StepRecord | AuditReport], *, following: bool = True) -> Path:
    """Write the events of a job in whose generation 4 this was told, through what keepers write them with."""
    journal = Journal(str(folder), "job", "n0")
    sealed(journal, 4, "n0", "n1", "n2")
    for one in told:
        if isinstance(one, AuditReport):
            journal.trainer(w.AuditHeard(slot=0, trainer=1, report=one), 4, 0)
        else:
            journal.trainer(w.StepFinished(slot=0, trainer=1, record=one), 4, 0)
    if following:
        sealed(journal, 5, "n0", "n2")
    journal.close()
    return folder


def sealed(journal: Journal, number: int, *names: str) -> None:
    nodes = tuple(Node(name=name, incarnation="1", address="10.0.0.1", slots=(Slot(tile_port=1),)) for name in names)
    formed = Generation(number=number, cause=Cause.LYING, nodes=nodes, layout=Layout(pp=1, dp=2), leader="n9")
    journal.noted(m.GenerationPut(generation=formed, revision=number))


@pytest.mark.parametrize("name", sorted(SCENES))
def test_page(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """One page: what, who, why, what was done, and what to do now."""
    folder = written(tmp_path, SCENES[name])
    shown = CliRunner().invoke(application(), ["explain", "--events", str(folder)])
    assert shown.exit_code == 0, shown.output
    file = PAGES / f"{name}.txt"
    if request.config.getoption("--rewrite-displays", default=False):
        file.write_text(shown.output)
    assert shown.output == file.read_text()
    document = json.loads(CliRunner().invoke(application(), ["explain", "4", "--events", str(folder), "--json"]).output)
    assert document["kind"] in {"numbers", "lying", "exam", "state"}
    assert len(shown.output.splitlines()) < 30


def test_samples_that_the_run_knew_of_are_no_trouble(tmp_path: Path) -> None:
    """Somebody asked for them to be left out."""
    folder = written(tmp_path, [replace(WELL, excluded=((1440, 1452),))], following=False)
    shown = CliRunner().invoke(application(), ["explain", "--events", str(folder)])
    assert shown.exit_code == 1
    assert "nothing was found about any generation" in shown.output


def test_what_is_in_the_older_file_of_a_node_is_explained(tmp_path: Path) -> None:
    """Past half of its limit a log goes on in another file."""
    folder = written(tmp_path, SCENES["lying"])
    (folder / "n0-0.jsonl").rename(folder / "n0-0.jsonl.1")
    (folder / "n0-0.jsonl").write_text("")
    shown = CliRunner().invoke(application(), ["explain", "--events", str(folder)])
    assert shown.stdout == (PAGES / "lying.txt").read_text()


def test_one_run_of_a_folder_is_explained(tmp_path: Path) -> None:
    """The one that wrote last, or that is named, whatever the numbers of their generations are."""
    folder = written(tmp_path, SCENES["lying"])
    mine = {"event": "generation.sealed", "run": "next", "at": 9e9, "number": 1, "nodes": ["n0"]}
    (folder / "n1-0.jsonl").write_text(json.dumps(mine) + "\n")
    shown = CliRunner().invoke(application(), ["explain", "--events", str(folder)])
    assert shown.exit_code == 1
    assert "nothing was found about any generation" in shown.stdout
    assert shown.stderr == "elastic3d: other runs in this folder, which --id names: job\n"
    named = CliRunner().invoke(application(), ["explain", "--events", str(folder), "--id", "job"])
    assert named.stdout == (PAGES / "lying.txt").read_text()
    assert CliRunner().invoke(application(), ["explain", "--events", str(folder), "--id", "third"]).exit_code == 2


def test_every_meaning_is_of_an_event_and_says_what_to_do() -> None:
    """A name alone helps nobody, and one that no event has is never explained."""
    given = [((name, ""), meaning) for name, meaning in MEANINGS.items()]
    for (name, compared), meaning in [*given, *EXCHANGED.items()]:
        assert name in EVENTS
        fields = {"loss": 2.0, "usual": 1.0, "compared": compared}
        page = trouble_page(explain_trouble(Trouble(event=name, generation=3, fields=fields)))
        assert meaning.fault in page
        assert "Do now" in page
        assert "{nodes}" not in page


def test_what_ends_a_generation_is_explained_before_what_does_not() -> None:
    """Of several troubles in one; a newer generation comes first all the same."""
    given = [
        Trouble(event="node.lying", generation=4, at=1.0),
        Trouble(event="audit.failed", generation=4, at=2.0),
        Trouble(event="loss.spiked", generation=3, at=3.0),
    ]
    chosen = newest(given)
    assert chosen is not None
    assert chosen.event == "node.lying"
    chosen = newest(given, 3)
    assert chosen is not None
    assert chosen.event == "loss.spiked"
    assert newest(given, 7) is None


def test_what_came_first_does_not_go_by_clocks() -> None:
    """A node whose clock is an hour ahead has told of step 5, and one whose clock is right of step 9 after it."""
    given = [
        Trouble(event="batch.excluded", generation=2, at=3605.0, fields={"step": 5, "samples": [[40, 42]]}),
        Trouble(event="batch.excluded", generation=2, at=9.0, fields={"step": 9, "samples": [[72, 74]]}),
    ]
    chosen = newest(given)
    assert chosen is not None
    assert chosen.step == 9
    assert "; since step 5 in generation 2" in " ".join(explain_trouble(chosen, given).reasons)


@pytest.mark.parametrize("rest", ["", "{", "[]", "null", '{"stalls": 3}', "\0" * 40])
def test_a_bundle_of_which_a_crash_left_part_hides_no_other(tmp_path: Path, rest: str) -> None:
    """What can be read is explained; what cannot is named."""
    verdict = Verdict(kind=VerdictKind.STUCK, fault="stopped", key="3.0", step=7, detail="rank 0 of n0 is stopped")
    bundles = [tmp_path / "evidence" / name for name in ("3.0-7-stuck-n0", "4.0-9-stuck-n0")]
    for bundle in bundles:
        bundle.mkdir(parents=True)
        (bundle / STALLS).write_text(rest)
        (bundle / VERDICT).write_text(rest)
    (bundles[0] / VERDICT).write_text(json.dumps({"schema": 1, **to_json(verdict)}))
    shown = CliRunner().invoke(application(), ["explain", "--events", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "rank 0 of n0 is stopped" in shown.stdout
    assert f"{bundles[1] / VERDICT} holds no verdict" in shown.stderr
    assert f"{bundles[0] / STALLS} does not say" in shown.stderr
