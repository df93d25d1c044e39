"""A schedule on somebody's script: what is kept of it, what it is compared with, and what is refused beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chaos.commands import storm as commands
from chaos.commands.app import app
from chaos.faults.catalogue import lacking
from chaos.faults.etcd import EtcdPassword, EtcdPause, EtcdRestored
from chaos.faults.fault import Fault, Need
from chaos.faults.moment import When
from chaos.faults.network import Cut
from chaos.faults.orders import Join
from chaos.faults.process import Kill, KillCompanion
from chaos.history.follow import picture
from chaos.judging.notices import notices
from chaos.judging.oracle import judge
from chaos.playing.own_script import ScriptSetting, known_steps, quiet_key, quiet_run, sound
from chaos.playing.play import Outcome
from chaos.schedules.schedule import Schedule
from chaos.storms import storm as playing
from chaos.storms.storm import PASSWORD, Job, Storm, keep, kept_storm, left_out, play_storm
from elastic3d.errors import UsageError
from tests.chaos.made_up_events import BATCH, a_death_and_a_join, event, sealed, step

KILL, JOIN = Kill(node="node1", when=When(step=3)), Join(when=When(event="peer.lost"))
EVERY = "every fault of the schedule comes to pass"
PAUSE = EtcdPause(seconds=2.0, when=When(step=4))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script that is only read."""
    path = tmp_path / "train.py"
    path.write_text("import elastic3d\n")
    return path


def setting(script: Path) -> ScriptSetting:
    return ScriptSetting(target=script, given=("--seed={seed}", "--data={out}/x", "--other={here}"), seed=7)


def quiet(setting: ScriptSetting) -> Outcome:
    """Return an undisturbed run of six steps."""
    events = [sealed(1, 0.0, "start", ["node0", "node1"]), *(step(n, float(n), 1) for n in range(1, 7))]
    return Outcome(
        setting=setting,
        faults=(),
        picture=picture(events),
        digest="abc",
        exit_codes={"node0": 0, "node1": 0},
        killed=(),
        undone=(),
        leftovers=(),
    )


def played_with(script: Path, patch: pytest.MonkeyPatch, **became: Any) -> list[tuple[Fault, ...]]:
    """Have what is played be a quiet job of which that became; return a list of the faults that are given."""
    given: list[tuple[Fault, ...]] = []

    def play(setting: ScriptSetting, faults: tuple[Fault, ...], *_: object, **__: object) -> Outcome:
        given.append(faults)
        return replace(quiet(setting), faults=faults, **became)

    patch.setattr(playing, "play_watched", play)
    return given


def storm(setting: ScriptSetting, digest: str = "abc") -> Storm:
    """Return what became of a job of which node1 was killed, and node4 let in."""
    calm = quiet(setting)
    outcome = replace(
        calm,
        setting=known_steps(setting, calm),
        faults=(KILL, JOIN),
        picture=picture(a_death_and_a_join()),
        digest=digest,
        killed=("node1",),
        made=((KILL, 12.0), (JOIN, 13.0)),
    )
    lost = event("peer.lost", 12.75, peer="node1", evidence="")
    return Storm(
        schedule=Schedule(faults=(KILL, JOIN, PAUSE), seed=7),
        outcome=outcome,
        verdict=judge(outcome, calm),
        skipped=((KillCompanion(node="node0", when=When(step=3)), "one slot"),),
        notices=tuple(notices(outcome, [lost])),
    )


def test_a_scripts_arguments_are_filled_in(script: Path) -> None:
    """With the places of this run; other braces are the script's own."""
    given = setting(script).arguments(store="file:///s", events=Path("/e"), out=Path("/o"))
    assert given == ("file:///s", "/e", "/o", str(script), "--seed=7", "--data=/o/x", "--other={here}")


def test_the_undisturbed_run_says_how_long_a_job_is(script: Path) -> None:
    """And how many samples a step has. A script that makes no step is refused by its name."""
    calm = quiet(setting(script))
    known = known_steps(setting(script), calm)
    assert (known.steps, known.global_batch) == (6, BATCH)
    assert judge(replace(calm, setting=known), calm).kept
    with pytest.raises(UsageError, match=r"train.py: it made no step, so nothing can happen to it"):
        known_steps(setting(script), replace(calm, picture=picture([])))


def test_an_undisturbed_run_is_played_once_for_all_schedules_and_layouts(script: Path, tmp_path: Path) -> None:
    """Until the script, its arguments or its seed are others; one that failed is not kept."""
    first, played = setting(script), []

    def play() -> Outcome:
        played.append(1)
        return quiet(first)

    failed = quiet_run(first, tmp_path / "kept", lambda: replace(quiet(first), digest=None, failure="it hung"))
    assert failed.failure == "it hung"
    once = quiet_run(first, tmp_path / "kept", play)
    wider = replace(first, nodes=7, slots=2)
    again = quiet_run(wider, tmp_path / "kept", play)
    assert (again.picture.steps, again.digest, len(played)) == (once.picture.steps, once.digest, 1)
    keys = {quiet_key(one) for one in (first, wider, replace(first, seed=8), replace(first, given=("--x",)))}
    script.write_text("import elastic3d as e\n")
    assert len(keys | {quiet_key(first)}) == 4
    (script.parent / "layers").mkdir()
    for beside in ("model.py", "layers/__init__.py", "layers/mlp.py"):
        keys.add(quiet_key(first))
        (script.parent / beside).write_text("width = 1\n")
    (script.parent / "layers" / "mlp.py").write_text("width = 2\n")
    assert len(keys | {quiet_key(first)}) == 7, "what it imports from beside it counts too"


def test_what_is_kept_of_a_run_is_played_again(script: Path, tmp_path: Path) -> None:
    """The same schedule and the same job; a broken promise keeps logs and events, too."""
    job = Job(script=str(script), arguments=("--seed={seed}",), nodes=4, seed=7)
    (tmp_path / "job" / "nodes" / "node0").mkdir(parents=True)
    (tmp_path / "job" / "events").mkdir()
    (tmp_path / "job" / "nodes" / "node0" / "agent.log").write_text("said\n")
    made = storm(setting(script))
    assert made.verdict.broken == ()
    folders = [keep(made, job, tmp_path / "out", tmp_path) for _ in range(2)]
    assert [folder.name for folder in folders] == ["passed-7", "passed-7.2"]
    assert kept_storm(folders[0]) == (made.schedule, job)
    broken = keep(storm(setting(script), digest="abd"), job, tmp_path / "out", tmp_path)
    assert (broken.name, (broken / "node0.log").read_text()) == ("failed-7", "said\n")
    verdict = json.loads((broken / "verdict.json").read_text())
    assert verdict["kept"] is False
    assert verdict["skipped"] == [{"fault": "kill-companion node0 slot=1 @3", "why": "one slot"}]
    assert verdict["inexact"] == ["pause etcd for 2 s @4"]
    assert verdict["noticed"] == [
        {"fault": "kill node1@3", "by": "peer.lost", "after": 0.75},
        {"fault": "join @peer.lost", "by": "member.joined", "after": None},
    ]


def test_a_run_is_named_by_its_schedules_seed(script: Path, tmp_path: Path) -> None:
    """Each of the drawn runs of one job has another one, also where it is played again; without one, by the job's."""
    job = Job(script=str(script), seed=7)
    made = storm(setting(script))
    of_seeds = [replace(made, schedule=replace(made.schedule, seed=seed)) for seed in (12, 0, None)]
    folders = [keep(one, job, tmp_path, tmp_path) for one in of_seeds]
    assert [folder.name for folder in folders] == ["passed-12", "passed-0", "passed-7"]
    assert "7, of the schedule 12" in (folders[0] / "report.html").read_text()
    assert "7, of the schedule" not in (folders[2] / "report.html").read_text()


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """With what is missing in it, or wrong."""
    with pytest.raises(UsageError, match=r"no folder of a run: job.json: No such file"):
        kept_storm(tmp_path)
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(UsageError, match="it is no job"):
        kept_storm(tmp_path)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("[[fault]]\ndo = 'kill'\nnode = 'node9'\nat = {step = 3}", [], "no such node"),
        ("[[fault]]\ndo = 'kil'\nnode = 'node1'\nat = {step = 3}", [], "did you mean 'kill'"),
        ("[[fault]]\ndo = 'join'\nat = {step = 3}", ["--script", "none.py"], "none.py: there is no such file"),
        ("[[fault]]\ndo = 'kill-companion'\nnode = 'node1'\nat = {step = 3}", [], "nothing is left of the schedule"),
    ],
)
def test_what_cannot_be_played_is_refused_before_anything_starts(
    text: str, arguments: list[str], message: str, script: Path, tmp_path: Path
) -> None:
    """With exit code 2, one line on standard error, and nothing on standard output."""
    storm = tmp_path / "storm.toml"
    storm.write_text(text)
    given = ["run", str(storm), "--script", str(script), "--out", str(tmp_path / "out"), "--json", *arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "storm.toml", "--script", "train.py", "--out", "file/out"],
        ["run", "storm.toml", "--script", "train.py", "--junit", "file/chaos.xml"],
        ["replay", "failed-7", "--out", "file/out"],
        ["random", "--script", "train.py", "--out", "file/out"],
        ["random", "--script", "train.py", "--junit", "file/chaos.xml"],
        ["shrink", "failed-7", "--out", "file/out"],
        ["soak", "--hours", "24", "--out", "file/out"],
        ["soak", "--hours", "24", "--junit", "file/chaos.xml"],
    ],
    ids=lambda given: f"{given[0]} {given[-2]}",
)
def test_where_nothing_can_be_written_nothing_is_played(
    arguments: list[str], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 2 and the place at once, and not after hours. Here a file is where a folder should be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "storm.toml").write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "nodes").mkdir()
    (tmp_path / "job" / "events").mkdir()
    keep(storm(setting(script), digest="abd"), Job(script=str(script), seed=7), tmp_path, tmp_path)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 2, result.output
    assert "it cannot be written" in result.stderr
    assert result.stdout == ""


def test_what_was_judged_is_told_where_nothing_can_be_kept(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full by then takes no verdict away; and build servers get a case per promise."""

    def full(*_: object) -> Path:
        raise UsageError("out: it cannot be written: No space left on device")

    played, schedule, xml = storm(setting(script)), tmp_path / "storm.toml", tmp_path / "chaos.xml"
    schedule.write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")
    monkeypatch.setattr(commands, "play_storm", lambda *_, **__: played)
    monkeypatch.setattr(commands, "keep", full)
    given = ["run", str(schedule), "--script", str(script), "--out", str(tmp_path), "--junit", str(xml), "--json"]
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, "No space left on device" in result.stderr) == (2, True)
    kept = json.loads(result.stdout)
    assert (kept["kept"], kept["folder"]) == (True, None)
    (suite,) = ElementTree.parse(xml).getroot()
    assert len(suite) == len(kept["promises"]) + len(kept["skipped"])
    assert suite.get("failures") == "0"
    judged = [one["says"] for one in kept["promises"] if one["held"] is not None]
    assert [case.get("name") for case in suite if not len(case)] == judged
    assert suite[-1][0].get("message") == "one slot"


@pytest.mark.etcd
def test_a_password_is_written_into_a_folder_of_its_own(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nobody has made, as where a schedule is made small."""

    def play(*_: object, **__: object) -> Outcome:
        raise UsageError("as far as here")

    monkeypatch.setattr(playing, "play_watched", play)
    schedule = Schedule(faults=(EtcdPassword(when=When(step=3)),))
    workdir = tmp_path / "work" / "0"
    with pytest.raises(UsageError, match="as far as here"):
        play_storm(schedule, Job(script=str(script)), workdir=workdir, kept=tmp_path, console=Console(), compare=False)
    assert (workdir / "etcd-password").read_text() == PASSWORD


@pytest.mark.etcd
@pytest.mark.netns
def test_nodes_are_hosts_of_their_own_unless_they_are_to_be_on_loopback(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undisturbed too: what needs the internet is told so before anything is done to it."""
    if why := lacking(Need.HOSTS):
        pytest.skip(why)
    networks: list[bool] = []

    def play(setting: ScriptSetting, *_: object, **__: object) -> Outcome:
        networks.append(setting.network is not None)
        return replace(quiet(setting), digest=None, failure="it cannot download")

    monkeypatch.setattr(playing, "play_watched", play)
    schedule = Schedule(faults=(Kill(node="node1", when=When(step=3)),))
    hint = "; if it needs the internet, give --loopback"
    for job, said in ((Job(script=str(script)), hint), (Job(script=str(script), loopback=True), "")):
        with pytest.raises(UsageError, match=rf"fails undisturbed: it cannot download{said}$"):
            play_storm(schedule, job, workdir=tmp_path / "work", kept=tmp_path, console=Console())
    assert networks == [True, False]


@pytest.mark.etcd
def test_what_had_not_happened_when_the_job_ended_is_skipped(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither counted as made nor a broken promise."""
    restored, pause = EtcdRestored(when=When(step=5)), EtcdPause(when=When(step=2))
    played = played_with(script, monkeypatch, late=(restored,), made=((pause, 2.0),))
    job = Job(script=str(script), loopback=True)
    schedule = Schedule(faults=(pause, restored))
    made = play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console(), compare=False)
    assert played == [(pause, restored)]
    assert made.skipped == ((restored, "the job had ended before it happened"),)
    (promise,) = [one for one in made.verdict.promises if one.says == EVERY]
    assert (promise.held, promise.seen) == (True, f"1 of 2; the job had ended before {restored}")


@pytest.mark.etcd
def test_what_waits_for_what_is_skipped_is_skipped_too(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is lost where no cable can be pulled; what waits for a step alone has to come all the same."""
    cut, after = Cut(node="node3", when=When(step=2)), Kill(node="node1", when=When(event="peer.lost"))
    recovering, stays = Kill(node="node2", when=When(generation=2)), EtcdPause(when=When(step=5))
    job, schedule = Job(script=str(script), loopback=True), Schedule(faults=(cut, after, recovering, stays))
    why = "its moment never came, to which what is skipped may lead"
    played_with(script, monkeypatch, undone=(after, recovering, stays))
    made = play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console(), compare=False)
    assert made.skipped[0][0] == cut
    assert made.skipped[1:] == ((after, why), (recovering, why))
    (promise,) = [one for one in made.verdict.promises if one.says == EVERY]
    assert (promise.seen, promise.broken) == ("0 of 1", (f"{stays}: its moment never came",))
    played_with(script, monkeypatch, undone=(after,))
    whole = replace(schedule, faults=(after, stays))
    made = play_storm(whole, job, workdir=tmp_path / "x", kept=tmp_path, console=Console(), compare=False)
    assert (made.skipped, made.kept) == ((), False)


@pytest.mark.parametrize(
    ("fault", "more", "message"),
    [
        (
            "do = 'flip-snapshot'\nnode = 'node1'\nat = {step = 3}",
            [],
            "flip-snapshot node1@3: it is not for --mode restart",
        ),
        ("do = 'kill'\nnode = 'node1'\nat = {step = 3}", ["--bars", "2"], "--bars 2: a script under --mode restart"),
    ],
)
def test_what_a_plain_script_cannot_meet_is_refused_before_anything_starts(
    fault: str, more: list[str], message: str, script: Path, tmp_path: Path
) -> None:
    """With exit code 2, as what no script can meet is."""
    storm = tmp_path / "storm.toml"
    storm.write_text(f"[[fault]]\n{fault}")
    given = ["run", str(storm), "--script", str(script), "--mode", "restart", "--out", str(tmp_path / "out"), *more]
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert message in result.stderr


def test_a_plain_script_is_run_as_it_is(script: Path, tmp_path: Path) -> None:
    """With its own arguments alone, and kept apart from the same script in the other mode, which may tell no step."""
    job = Job(script=str(script), arguments=("--out={out}",), seed=7, conf={"mode": "restart"})
    plain, ours = job.setting(), replace(job, conf={}).setting()
    assert plain.script == plain.target == script
    assert plain.arguments(store="file:///s", events=Path("/e"), out=Path("/o")) == ("--out=/o",)
    assert quiet_key(plain) != quiet_key(ours)
    silent = replace(quiet(plain), picture=picture([]), digest=None)
    assert known_steps(plain, silent).steps == 0
    assert quiet_run(plain, tmp_path, lambda: silent) == silent
    again = quiet_run(plain, tmp_path, lambda: pytest.fail("it was kept"))
    assert (again.digest, again.picture.steps) == (None, ())
    failed = replace(silent, exit_codes={"node0": 1})
    assert (sound(silent), sound(failed), sound(replace(silent, failure="it stands"))) == (True, False, False)


def test_the_catalogue_is_listed() -> None:
    """All of it, or what enters at some places; as JSON with a schema."""
    everything = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    some = json.loads(CliRunner().invoke(app, ["list", "--json", "--place", "etcd", "--place", "store"]).stdout)
    assert everything["schema"] == 1
    assert {one["place"] for one in some["faults"]} == {"etcd", "store"}
    assert [one for one in everything["faults"] if one["place"] in ("etcd", "store")] == some["faults"]
    assert "etcd-restart" in CliRunner().invoke(app, ["list", "--place", "etcd"]).stdout


def test_what_a_run_has_left_out_is_what_the_one_that_knew_of_it_leaves_out() -> None:
    """Each hole once, whoever said it, and in the order of positions."""
    said = [
        event("run.rolled_back", 3.0, samples=[[320, 400]]),
        event("batch.excluded", 1.0, samples=[[66, 68]]),
        event("batch.excluded", 2.0, samples=[[66, 68], [70, 72]]),
        event("step.committed", 2.0, samples=[0, 8]),
    ]
    assert left_out(said) == ["--exclude=66:68", "--exclude=70:72", "--exclude=320:400"]
