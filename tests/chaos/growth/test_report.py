"""What a soak leaves: a plot that is an SVG document, the document with all samples, and the exit."""

from __future__ import annotations

import io
import json
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chaos.commands.app import app
from chaos.commands.shrink import failed
from chaos.commands.soak import exit_code
from chaos.faults.etcd import EtcdPause
from chaos.faults.moment import When
from chaos.faults.orders import Join
from chaos.faults.process import Kill
from chaos.growth.account import Known
from chaos.growth.again import job_of, schedule_of
from chaos.growth.facts import facts
from chaos.growth.measures import MB, measures
from chaos.growth.page import soak_page
from chaos.growth.plot import growth_plot, nice
from chaos.growth.report import append, begin, cases, document, keep, shown
from chaos.growth.sampling import Sample
from chaos.growth.soak import TRAIN_SOAK, Plan, Soak
from chaos.judging.promise import Promise
from chaos.report.junit import junit
from chaos.schedules.schedule import check
from elastic3d.values import from_json
from tests.chaos.growth.test_sampling import samples
from tests.chaos.pages import Page

SVG = "{http://www.w3.org/2000/svg}"


def made_up(leak: float = 0.0) -> Soak:
    return Soak(
        plan=Plan(seconds=1200.0),
        samples=tuple(samples(leak)),
        made=((Kill(node="node1", when=When(step=20)), 30.0),),
        promises=(),
        trained=1200.0,
        seconds=1250.0,
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


BROKEN = Promise(
    says="a step that is made again has the same bits",
    page="explanation/same-bits.md",
    seen="",
    broken=("step 3 was done again with other bits",),
)


def test_samples_are_kept_as_they_come(tmp_path: Path) -> None:
    """The same values as were measured, whatever ends it; the second soak of a seed has a folder of its own."""
    soak = made_up(MB)
    folder = begin(soak.plan, tmp_path / "out")
    for number, sample in enumerate(soak.samples, 1):
        append(folder, sample)
        assert len((folder / "samples.jsonl").read_text().splitlines()) == number
    lines = (folder / "samples.jsonl").read_text().splitlines()
    assert tuple(from_json(Sample, json.loads(one)) for one in lines) == soak.samples
    keep(soak, folder, tmp_path)
    kept = json.loads((folder / "growth.json").read_text())
    assert kept["grows"] == ["memory of lasting processes: node0 keeper"]
    assert begin(soak.plan, tmp_path / "out").name == "soak-7.2"


def test_growth_and_broken_promises_are_failures() -> None:
    """And said in words, a broken promise with what was promised and where."""
    calm, leaking = made_up(), made_up(MB)
    broken, ended = replace(calm, promises=(BROKEN,)), replace(calm, error="no endpoint answered")
    soaks = (calm, leaking, broken, ended)
    assert [exit_code(soak, measures(soak.samples)) for soak in soaks] == [0, 1, 1, 1]
    console = Console(file=io.StringIO(), width=160)
    for soak in soaks:
        console.print(shown(soak, measures(soak.samples)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "nothing grows, and every promise held" in text
    assert "grows: memory of lasting processes: node0 keeper" in text
    assert f"{BROKEN.says} (explanation/same-bits.md): step 3 was done again with other bits" in text
    assert "ended by an error: no endpoint answered" in text
    assert json.dumps(document(broken, measures(broken.samples)))


def test_the_page_has_all_that_a_soak_has_shown(tmp_path: Path) -> None:
    """In one file that loads nothing: what was measured, slopes beside their bars, plots, faults and promises; it is
    made anew from the folder."""
    held = replace(BROKEN, says="every <sample> counts", broken=(), seen="none missing")
    soak = replace(made_up(MB), promises=(BROKEN, held), stopped="step 3 was done again", began=10.0)
    folder = begin(soak.plan, tmp_path / "out")
    for sample in soak.samples:
        append(folder, sample)
    (tmp_path / "job" / "nodes").mkdir(parents=True)
    (tmp_path / "job" / "events").mkdir()
    keep(soak, folder, tmp_path)
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.links == []
    assert not {"script", "img", "link", "iframe"} & {*page.tags}
    assert "2 things went wrong in 20 min 50 s with 1 fault." in page.words
    assert "grows: memory of lasting processes: node0 keeper" in page.words
    assert "2400, 1 of them again" in page.words
    assert "kill node1@20 20 s" in page.words
    assert "every <sample> counts docs/explanation/same-bits.md none missing" in page.words
    assert f"elastic3d chaos replay {folder} --no-compare" in page.words
    assert page.tags.count("polyline") == len(measures(soak.samples))
    # At the start, by the hour, by the generation, over the run, and in its later half.
    slopes = "MB 95.8 60.0 bar 2.0 1.0 bar 0.012 14.8 floor 8.0 60.0 yes"
    assert f"node0 keeper memory of lasting processes, {slopes}" in page.words
    (folder / "report.html").unlink()
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert (result.exit_code, result.stdout.strip()) == (0, str(folder / "report.html"))
    assert (folder / "report.html").read_text() == text
    (folder / "picture.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert (result.exit_code, "it is no picture of a soak" in result.stderr) == (2, True)


def test_the_page_of_a_long_soak_can_be_opened() -> None:
    """A day with a fault every few seconds: of what there are thousands the page has some, and says how many."""
    kinds = (Kill(node="node1", when=When(step=20)), Join(when=When(step=40)))
    made = tuple((kinds[number % 2], 4.0 * number) for number in range(20_000))
    many = replace(BROKEN, broken=tuple(f"step {number} was done again" for number in range(5000)))
    first = samples(MB)
    long = [replace(one, at=one.at + 1250.0 * lap) for lap in range(70) for one in first][:5000]
    soak = replace(made_up(), samples=tuple(long), made=made, promises=(many,), seconds=86_400.0)
    series = measures(soak.samples)
    text = soak_page(facts(soak, series), series, "out/soak-7")
    words = Page(text).words
    assert len(text) < 1_000_000
    assert "the first 100 and the last 100 of 20000" in words
    assert "kill (10000)" in words
    assert "and 4980 more" in words


KEYS, DATABASE = "keys in etcd: keys of the present", "bytes in etcd: database in use"


def without_etcd(but: int) -> tuple[Sample, ...]:
    """Return samples in which etcd answered that often at the end."""
    some = samples(0.0)
    return tuple(replace(one, etcd=one.etcd if at >= len(some) - but else None) for at, one in enumerate(some))


@pytest.mark.parametrize(
    ("changes", "code", "why"),
    [
        ({"trained": 300.0, "stopped": "the script ended by itself"}, 4, "faults were made for 300 s of 1200 s"),
        ({"samples": ()}, 4, "no series with a bar has points enough for a line"),
        ({"samples": without_etcd(5)}, 4, f"too few points for a line: {KEYS}, {DATABASE}"),
        ({"samples": without_etcd(0)}, 4, "etcd was in no sample"),
        ({"made": ()}, 4, "no fault was made"),
        ({"interrupted": 2}, 130, "it was interrupted, and no promise was judged"),
    ],
    ids=["ended by itself", "no samples", "few of etcd", "none of etcd", "no fault", "ctrl-c"],
)
def test_what_was_too_short_to_tell_is_no_success(changes: dict[str, Any], code: int, why: str) -> None:
    """It neither passed nor failed, and says what it lacks."""
    soak = replace(made_up(), **changes)
    series = measures(soak.samples)
    console = Console(file=io.StringIO(), width=160)
    console.print(shown(soak, series))
    assert f"too short to say that nothing grows: {why}" in console.file.getvalue()  # type: ignore[attr-defined]
    shows = document(soak, series)
    assert (shows["passed"], shows["verdict"], shows["lacking"]) == (False, "short", [why])
    assert exit_code(soak, series) == code


def test_a_soak_is_played_again_as_any_run(tmp_path: Path) -> None:
    """As a schedule that can happen, of a job that ends by itself, and what was broken in it is made small."""
    join, late = Join(when=When(step=40)), Kill(node="node3", when=When(step=2390))
    soak = replace(made_up(), promises=(BROKEN,), made=(*made_up().made, (join, 60.0), (late, 1190.0)))
    (tmp_path / "job" / "nodes").mkdir(parents=True)
    (tmp_path / "job" / "events").mkdir()
    folder = begin(soak.plan, tmp_path / "out")
    keep(soak, folder, tmp_path)
    schedule, job, promise = failed(folder)
    assert [str(fault) for fault in schedule.faults] == ["kill node1@20", "join @40", "kill node3@2390"]
    check(schedule.faults, nodes=job.nodes, steps=2410)
    assert (promise, job.nodes, job.seed, job.conf) == (BROKEN.says, 3, 7, {"flaps": "0"})
    assert Path(job.script) == TRAIN_SOAK
    assert job.loopback, "its nodes were no hosts of their own, and its script may need the internet"
    assert {"--steps=2410", "--store={store}", "--events={events}", "--out={out}", "--pace=0.1"} <= {*job.arguments}
    theirs = replace(soak, plan=replace(soak.plan, script=TRAIN_SOAK, given=("--mine",)))
    assert job_of(theirs).arguments == ("--mine",)


def test_faults_of_a_job_that_went_back_keep_their_order() -> None:
    """The steps before the newest checkpoint come again, and so may the same fault at the same step."""
    pause, join, kill = EtcdPause(when=When(step=30)), Join(when=When(step=31)), Kill(node="node3", when=When(step=28))
    soak = replace(made_up(), steps=30, made=tuple((fault, 1.0) for fault in (pause, pause, join, kill)))
    schedule = schedule_of(soak)
    assert [(fault.WORD, fault.when.step) for fault in schedule.faults] == [
        ("etcd-pause", 30),
        ("etcd-pause", 31),
        ("join", 32),
        ("kill", 33),
    ]
    check(schedule.faults, nodes=3, steps=53)
    assert "--steps=53" in job_of(soak).arguments


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError("nobody foresaw this")


@pytest.mark.parametrize(("ends", "code"), [(interrupt, 0), (fail, 1)])
def test_what_was_measured_is_told_whatever_disturbs_the_writing_of_it(
    ends: Callable[[], None], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C comes too late to lose it; an error is said beside it."""

    def play(plan: Plan, *, settled: Callable[[], object], **_: object) -> Soak:
        settled()
        return made_up()

    def write(soak: Soak, folder: Path, workdir: Path) -> None:
        ends()
        keep(soak, folder, workdir)

    monkeypatch.setattr("chaos.commands.soak.play_soak", play)
    monkeypatch.setattr("chaos.commands.soak.keep", write)
    result = CliRunner().invoke(app, ["soak", "--minutes=20", f"--out={tmp_path}", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["steps"] == 2400
    assert (tmp_path / "soak-7" / "report.html").exists() == (code == 0)
    assert ("ValueError: nobody foresaw this" in result.stderr) == (code == 1)


def test_a_soak_as_junit_xml(tmp_path: Path) -> None:
    """A case per promise and per series with a bar; what ended it early is an error, what it lacks is skipped."""
    soak = replace(made_up(MB), promises=(BROKEN,))
    (suite,) = junit("soak", "train.py", tuple(cases(soak, measures(soak.samples), tmp_path)))
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("2", "0", "0")
    assert f"replay: elastic3d chaos replay {tmp_path} --no-compare" in str(suite[0][0].text)
    for changes, counts in (({"interrupted": 15}, ("1", "0")), ({"made": ()}, ("0", "1"))):
        other = replace(made_up(), **changes)  # type: ignore[arg-type]
        (suite,) = junit("soak", "train.py", tuple(cases(other, measures(other.samples), None)))
        assert (suite.get("errors"), suite.get("skipped")) == counts


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
