"""A schedule on somebody's script: what is kept of it, what it is compared with, and what is refused beforehand."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chaos.commands import shrink
from chaos.commands import storm as commands
from chaos.commands.app import app
from chaos.faults.catalogue import lacking
from chaos.faults.etcd import EtcdPassword, EtcdPause, EtcdRestored
from chaos.faults.fault import Fault, Need
from chaos.faults.moment import When
from chaos.faults.network import Cut
from chaos.faults.orders import Join
from chaos.faults.process import Kill, KillBelow, KillCompanion
from chaos.faults.store import StoreFlips
from chaos.faults.store_disk import StoreDiskFull
from chaos.history.follow import picture
from chaos.judging.notices import notices
from chaos.judging.oracle import judge
from chaos.machine.small_disk import SmallDisk
from chaos.playing.outcome import Outcome
from chaos.playing.own_script import ScriptSetting, known_steps, quiet_key, quiet_run, sound
from chaos.report import junit
from chaos.report.folder import write_report
from chaos.schedules.schedule import Schedule
from chaos.storms import storm as playing
from chaos.storms.folders import new_folder
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
    assert (known.steps, known.consumed(6), known.consumed(2)) == (6, 6 * BATCH, 2 * BATCH)
    assert judge(replace(calm, setting=known), calm).kept
    with pytest.raises(UsageError, match=r"train.py: it made no step, so nothing can happen to it"):
        known_steps(setting(script), replace(calm, picture=picture([])))


def test_no_sample_is_said_to_be_missing_or_repeated_where_the_batch_grows(script: Path) -> None:
    """Neither at the end nor where the job has to end before; one step less than the undisturbed run is missed."""
    ends = (4, 8, 16, 24, 32, 40)
    events = [
        replace(one, fields={**one.fields, "samples": [first, stop]})
        for number, (first, stop) in enumerate(pairwise((0, *ends)), 1)
        for one in [step(number, float(number), 1)]
    ]
    start = sealed(1, 0.0, "start", ["node0", "node1"])
    calm = replace(quiet(setting(script)), picture=picture([start, *events]))
    known = known_steps(setting(script), calm)
    assert judge(replace(calm, setting=known), calm).broken == ()
    less = replace(calm, setting=known, picture=picture([start, *events[:-1]]))
    assert judge(less, calm).samples.missing == 8
    ended = replace(less, picture=picture([start, *events[:3]]), made=((KillBelow(when=When(step=3)), 3.5),), hit=("",))
    assert (judge(ended, calm).samples.missing, judge(ended, calm).samples.repeated) == (0, 0)


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
    (script.parent / "plain").mkdir()
    for beside in ("model.py", "layers/__init__.py", "layers/mlp.py", "plain/no_init.py"):
        keys.add(quiet_key(first))
        (script.parent / beside).write_text("width = 1\n")
    (script.parent / "layers" / "mlp.py").write_text("width = 2\n")
    assert len(keys | {quiet_key(first)}) == 8, "what it imports from beside it counts too"


@pytest.mark.parametrize("argument", ["{}", "--config={}"])
def test_an_undisturbed_run_is_played_anew_once_a_file_that_an_argument_names_is_another(
    argument: str, script: Path, tmp_path: Path
) -> None:
    """A script may have most of what it does from there."""
    settings = tmp_path / "settings.yaml"
    job = replace(setting(script), given=("--config", argument.format(settings), "x" * 5000, "--rate=1"))
    keys = set()
    for text in ("steps: 60\n", "steps: 90\n"):
        settings.write_text(text)
        keys.add(quiet_key(job))
    assert len(keys) == 2


def test_runs_may_keep_the_same_things_at_once(script: Path, tmp_path: Path) -> None:
    """None takes away what another one has just written, and each has a folder of its own."""
    job, begin = setting(script), threading.Barrier(8, timeout=10)

    def kept(number: int) -> tuple[Outcome, Path]:
        out = tmp_path / str(number // 8)
        begin.wait()
        return quiet_run(job, out, lambda: quiet(job)), new_folder(out, "failed-7")

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(kept, range(160)))
    assert {outcome.digest for outcome, _ in runs} == {"abc"}
    assert len({folder for _, folder in runs}) == 160
    assert not list(tmp_path.glob("*/*.part"))


@pytest.mark.etcd
def test_a_script_that_fails_undisturbed_after_its_end_is_refused(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left its digest, and what it does then would be held against whatever is done to the job."""
    played_with(script, monkeypatch, exit_codes={"node0": 0, "node1": 3})
    job, schedule = Job(script=str(script), loopback=True), Schedule(faults=(PAUSE,))
    with pytest.raises(UsageError, match=r"train\.py: it fails undisturbed: node1 ended with 3"):
        play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console())
    assert not list(tmp_path.glob("quiet-*")), "nothing is kept of it"


def test_a_full_disk_that_takes_no_undisturbed_run_is_named(script: Path, disk: SmallDisk) -> None:
    """With what to do, and nothing of the run is left on it."""
    out = disk.folder / "out"
    out.mkdir()
    (disk.folder / "other").write_text("what takes the room")
    disk.fill()
    with pytest.raises(UsageError, match=rf"{out}.*: it cannot be written: No space left on device; name another"):
        quiet_run(setting(script), out, lambda: quiet(setting(script)))
    assert not list(out.iterdir())


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


@pytest.mark.parametrize("end", [SystemExit(130), OSError(28, "No space left on device")], ids=["Ctrl-C", "disk"])
def test_no_part_of_a_folder_is_kept(
    end: BaseException, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look like a run that can be played again, and be none that can be reported or shrunk."""

    def ended(*_: object) -> str:
        raise end

    monkeypatch.setattr(playing, "loss_plot", ended)
    with pytest.raises((SystemExit, UsageError)):
        keep(storm(setting(script)), Job(script=str(script)), tmp_path / "out", tmp_path)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("command", ["run", "shrink"])
def test_ctrl_c_that_comes_when_all_is_played_takes_nothing_away(
    command: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being kept then is kept whole, and told, with the exit code that it has by itself."""
    broken, schedule, out = storm(setting(script), digest="abd"), tmp_path / "storm.toml", tmp_path / "out"
    schedule.write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")
    (tmp_path / "job" / "nodes").mkdir(parents=True)
    (tmp_path / "job" / "events").mkdir()
    kept = keep(broken, Job(script=str(script)), tmp_path, tmp_path)

    def interrupted(folder: Path) -> Path:
        signal.raise_signal(signal.SIGINT)
        return write_report(folder)

    def play(*_: object, workdir: Path, **__: object) -> Storm:
        shutil.copytree(tmp_path / "job", workdir / "job")
        return broken

    monkeypatch.setattr(commands, "play_storm", play)
    monkeypatch.setattr(shrink, "play_storm", play)
    monkeypatch.setattr(playing if command == "run" else shrink, "write_report", interrupted)
    given = {"run": [str(schedule), "--script", str(script)], "shrink": [str(kept), "--tries", "1"]}[command]
    result = CliRunner().invoke(app, [command, *given, "--out", str(out), "--json"])
    assert result.exit_code == {"run": 1, "shrink": 0}[command], result.output
    folder = Path(json.loads(result.stdout)["folder"])
    assert [one for one in out.iterdir() if one.is_dir()] == [folder]
    assert (folder / "report.html").exists()


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"job\.json: it is no job"),
        ("[]", r"job\.json: it is no job"),
        ("[" * 100_000, r"job\.json: it is no job"),
        ('{"script": "train.py", "schema": 2}', r"job\.json: its schema is 2, and 1 is known here"),
        ('{"script": "train.py", "node": 3}', r"job\.json: a job has no node"),
        ('{"script": "train.py", "nodes": 0}', r"job\.json: nodes 0: a job has one at least"),
        ('{"script": "train.py", "slots": -1}', r"job\.json: slots -1: a job has one at least"),
        ('{"script": "train.py", "patience": NaN}', r"job\.json: patience nan: give seconds"),
        ('{"script": "train.py", "conf": {"mode": "resume"}}', r"job\.json: mode 'resume': it is resident or"),
        ('{"script": "train.py", "tolerance": -1}', r"job\.json: .*tolerance"),
    ],
)
def test_a_job_that_a_person_has_spoilt_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """Before anything is played, with the file and what is wrong in it."""
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(UsageError, match=message):
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
    ("arguments", "option"),
    [
        (["run", "storm.toml", "--script", "train.py"], "--patience"),
        (["random", "--script", "train.py"], "--patience"),
        (["random", "--script", "train.py"], "--minutes"),
        (["shrink", "failed-7"], "--minutes"),
        (["soak", "--minutes", "1"], "--patience"),
        (["soak"], "--hours"),
        (["soak"], "--minutes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_time_that_never_ends_or_is_none_is_refused(arguments: list[str], option: str, value: str) -> None:
    """A job that stands would never be given up."""
    result = CliRunner().invoke(app, [*arguments, option, value])
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{option}'" in result.stderr


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "storm.toml", "--script", "train.py"],
        ["run", "none.toml", "--script", "train.py"],
        ["replay", "passed-7"],
        ["random", "--script", "none.py"],
        ["soak", "--hours", "0"],
    ],
    ids=" ".join,
)
def test_what_an_earlier_run_wrote_for_build_servers_is_not_taken_for_this_ones(
    arguments: list[str], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an error ends it before there is anything to write, it has an error."""

    def play(*_: object, **__: object) -> Storm:
        raise UsageError(f"{script.name}: it fails undisturbed")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "storm.toml").write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")
    keep(storm(setting(script)), Job(script=str(script)), tmp_path, tmp_path)
    monkeypatch.setattr(commands, "play_storm", play)
    xml = tmp_path / "chaos.xml"
    junit.write(xml, "elastic3d chaos run", "train.py", [junit.Case(name="whole")])
    result = CliRunner().invoke(app, [*arguments, "--junit", str(xml)])
    assert result.exit_code == 2, result.output
    (suite,) = ElementTree.parse(xml).getroot()
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")


@pytest.mark.parametrize("command", ["run", "replay", "shrink"])
def test_a_full_disk_is_told_in_words(
    command: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it shows: which one, and how to have temporary files elsewhere. Not by a traceback."""

    def play(*_: object, **__: object) -> Storm:
        raise OSError(28, "No space left on device", "/tmp/job/events")

    broken, schedule, job = storm(setting(script), digest="abd"), tmp_path / "storm.toml", Job(script=str(script))
    schedule.write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")
    (tmp_path / "job" / "nodes").mkdir(parents=True)
    (tmp_path / "job" / "events").mkdir()
    kept = keep(broken, job, tmp_path, tmp_path)
    monkeypatch.setattr(commands, "play_storm", play)
    monkeypatch.setattr(shrink, "play_storm", play)
    given = {"run": [str(schedule), "--script", str(script)]}.get(command, [str(kept)])
    result = CliRunner().invoke(app, [command, *given, "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr.startswith("elastic3d: /tmp/job/events: No space left on device; make room there, or")
    assert "Traceback" not in result.stderr


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
    played = played_with(script, monkeypatch, late=(restored,), made=((pause, 2.0),), hit=("",))
    job = Job(script=str(script), loopback=True)
    schedule = Schedule(faults=(pause, restored))
    made = play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console(), compare=False)
    assert played == [(pause, restored)]
    assert made.skipped == ((restored, "the job had ended before it happened"),)
    (promise,) = [one for one in made.verdict.promises if one.says == EVERY]
    assert (promise.held, promise.seen) == (True, f"1 of 2; the job had ended before {restored}")


def test_the_command_that_plays_a_run_again_is_one_whatever_the_folder_is_called(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the terminal and for build servers."""
    out, schedule, xml = tmp_path / "my [old] runs", tmp_path / "storm.toml", tmp_path / "chaos.xml"
    schedule.write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")
    monkeypatch.setattr(commands, "play_storm", lambda *_, **__: storm(setting(script), digest="other bits"))
    monkeypatch.setattr(playing, "copy_logs", lambda *_: None)
    given = ["run", str(schedule), "--script", str(script), "--out", str(out), "--junit", str(xml)]
    told = CliRunner().invoke(app, given).stdout
    command = f"elastic3d chaos replay '{out}/failed-7'"
    assert command in told
    assert f"{out}/failed-7/report.html" in told
    assert f"replay: {command}" in xml.read_text()


@pytest.mark.etcd
def test_a_fault_of_the_store_that_no_request_met_is_skipped(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has happened to the job by it, which has lived through the other one alone."""
    flips = StoreFlips(when=When(step=3))
    played_with(script, monkeypatch, made=((flips, 3.5), (PAUSE, 4.5)), hit=("", ""), unmet=(flips,))
    monkeypatch.setattr(playing, "feasible", lambda faults, **_: (faults, ()))
    job, schedule = Job(script=str(script), loopback=True), Schedule(faults=(flips, PAUSE))
    made = play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console(), compare=False)
    assert made.skipped == ((flips, "no request of the store met it"),)
    assert made.document()["made"] == [str(PAUSE)]


@pytest.mark.etcd
@pytest.mark.parametrize("how", ["unmet", "late"])
def test_what_waits_for_a_fault_that_did_not_happen_is_skipped_too(
    how: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not made when the job is played is skipped as what cannot be made is."""
    restored = EtcdRestored(when=When(step=3))
    waits = Kill(node="node1", when=When(event="etcd.rolled_back"))
    played_with(script, monkeypatch, undone=(waits,), **{how: (restored,)})
    job, schedule = Job(script=str(script), loopback=True), Schedule(faults=(restored, waits))
    made = play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console(), compare=False)
    assert {fault for fault, _ in made.skipped} == {restored, waits}
    (promise,) = [one for one in made.verdict.promises if one.says == EVERY]
    assert promise.broken == ()


@pytest.mark.etcd
def test_what_never_came_since_the_job_had_to_end_is_skipped(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks no promise, and nobody takes it for one that the job has lived through."""
    below, never = KillBelow(when=When(step=3)), Kill(node="node1", when=When(event="checkpoint.committed", count=9))
    played_with(script, monkeypatch, made=((below, 3.5),), hit=("",), undone=(never,))
    job, schedule = Job(script=str(script), loopback=True), Schedule(faults=(below, never))
    made = play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console(), compare=False)
    assert made.skipped == ((never, f"the job had to end before, by {below}"),)


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


FULL = StoreDiskFull(when=When(step=2))
AFTER_FULL = Kill(node="node1", when=When(event="checkpoint.failed"))
LOST = Kill(node="node1", when=When(event="peer.lost"))
SECOND, THIRD = (Kill(node="node2", when=When(generation=number)) for number in (2, 3))


@pytest.mark.etcd
@pytest.mark.parametrize(
    ("skipped", "undone", "excused"),
    [
        (FULL, (LOST, SECOND), ()),
        (FULL, (AFTER_FULL, SECOND), (AFTER_FULL, SECOND)),
        (Cut(node="node3", when=When(generation=2)), (SECOND,), ()),
        (Cut(node="node3", when=When(generation=2)), (THIRD,), (THIRD,)),
        (Cut(node="node3", when=When(step=2)), (replace(LOST, when=When(event="peer.lost", step=40)),), ()),
    ],
    ids=["no generation follows", "one after the other", "it would come later", "it would come before", "a step"],
)
def test_only_what_may_have_waited_for_what_is_skipped_is_excused(
    skipped: Fault,
    undone: tuple[Fault, ...],
    excused: tuple[Fault, ...],
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what the catalogue says of it; whatever else never came breaks a promise, as where nothing is skipped."""
    schedule = Schedule(faults=(skipped, *undone, PAUSE))
    monkeypatch.setattr(playing, "feasible", lambda *_, **__: ((*undone, PAUSE), ((skipped, "not here"),)))
    played_with(script, monkeypatch, undone=undone)
    job = Job(script=str(script), loopback=True)
    made = play_storm(schedule, job, workdir=tmp_path / "w", kept=tmp_path, console=Console(), compare=False)
    assert [fault for fault, _ in made.skipped[1:]] == [*excused]
    (promise,) = [one for one in made.verdict.promises if one.says == EVERY]
    assert promise.broken == tuple(f"{one}: its moment never came" for one in undone if one not in excused)


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
