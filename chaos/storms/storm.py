"""One schedule on one job of anybody's script: what happened to it, and the folder from which it is replayed.

The folder has `schedule.toml`, `job.json` with the script and the nodes, `verdict.json`, the plot of the losses,
`report.html` for people with `picture.json`, of which it is made, and of a run in which a promise was broken its logs
and events.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from chaos.faults.catalogue import Skipped, feasible, lacking
from chaos.faults.fault import Fault, Need
from chaos.faults.process import KillBelow
from chaos.history.follow import Event, Picture
from chaos.judging import bars, endings
from chaos.judging.bars import Bars
from chaos.judging.losses import check_tolerance, tells_losses
from chaos.judging.notices import Notice, notices
from chaos.judging.oracle import Verdict, all_is_known, judge
from chaos.judging.oracle import document as history_document
from chaos.judging.restart import judge_restart
from chaos.machine.clocks import Clocks
from chaos.machine.closing import ClosingStack
from chaos.machine.hung_files import HungFiles
from chaos.machine.network import Network
from chaos.machine.small_disk import SmallDisk
from chaos.playing.outcome import Outcome
from chaos.playing.own_script import ANY_SCRIPT, ScriptSetting, known_steps, quiet_run, sound
from chaos.playing.setting import RESIDENT, RESTART
from chaos.playing.step_lines import step_pattern
from chaos.report.facts import FaultFact, Points, RunFacts, facts
from chaos.report.folder import PICTURE, write_report
from chaos.report.plot import loss_plot
from chaos.report.watching import play_watched
from chaos.schedules.files import load, to_toml
from chaos.schedules.restart import EVENTS, check_restart
from chaos.schedules.schedule import Schedule, check, may_be_why
from chaos.score.playing import TRAIN_FAULTY
from chaos.servers.etcd import EtcdCluster, EtcdServer
from chaos.servers.proxied_store import proxied_store
from chaos.servers.s3 import LOOPBACK
from chaos.storms.folders import whole_folder, writable_folder
from elastic3d.errors import UsageError
from elastic3d.values import from_json, to_json

SCHEMA = 1
PASSWORD, QUOTA = "first", 16 << 20
"""Of an etcd that has them for a fault: what is changed, and bytes that are soon written."""
SCHEDULE, JOB, VERDICT = "schedule.toml", "job.json", "verdict.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is needed to judge a job again. script: an absolute path. arguments: what ScriptSetting calls `given`.

    bars, recovery: what is asked of times, as `Bars` names it. loopback: whether its nodes are all on this machine's
    loopback; otherwise each is a host of its own where that can be made, with no way out of this machine. tolerance:
    within which share of each loss losses are judged, None to judge bits. step_pattern: of lines that tell a step under
    `--mode restart`, "" for `step 12`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    nodes: int = 4
    slots: int = 1
    seed: int = 17
    conf: dict[str, str] = field(default_factory=dict)
    patience: float = 180.0
    bars: float | None = None
    recovery: float | None = None
    loopback: bool = False
    tolerance: float | None = None
    step_pattern: str = ""

    def __post_init__(self) -> None:
        for name, number in (("nodes", self.nodes), ("slots", self.slots)):
            if number < 1:
                raise UsageError(f"{name} {number}: a job has one at least")
        if not (math.isfinite(self.patience) and self.patience > 0):
            raise UsageError(f"patience {self.patience:g}: give seconds, more than none")
        if (mode := self.conf.get("mode", RESIDENT)) not in (RESIDENT, RESTART):
            raise UsageError(f"mode {mode!r}: it is {RESIDENT} or {RESTART}")
        self.asked()
        check_tolerance(self.tolerance)
        step_pattern(self.step_pattern)
        if self.step_pattern and self.resident:
            raise UsageError(
                "--step-pattern: it is of --mode restart; a script that calls elastic3d.run tells its steps"
            )
        if self.bars is not None and not self.resident:
            raise UsageError(f"--bars {self.bars:g}: a script under --mode restart writes no events to be noticed by")

    @property
    def resident(self) -> bool:
        """Whether the script calls `elastic3d.run`, and is not restarted by torchrun: `mode` of `conf`."""
        return self.conf.get("mode", RESIDENT) == RESIDENT

    @property
    def faulty(self) -> bool:
        """Whether the script is the one that can fail by itself in all ways of the catalogue."""
        return Path(self.script).resolve() == TRAIN_FAULTY.resolve()

    @property
    def on_hosts(self) -> bool:
        """Whether each node is a host of its own."""
        return not self.loopback and not lacking(Need.HOSTS)

    def asked(self) -> Bars:
        """Return what is asked of times; UsageError where that makes no sense."""
        return Bars(noticed=self.bars, recovered=self.recovery)

    def setting(self) -> ScriptSetting:
        """Return the job as it is played; UsageError where there is no such script."""
        target = Path(self.script)
        if not target.is_file():
            raise UsageError(f"{self.script}: there is no such file, to be the script")
        return ScriptSetting(
            target=target,
            script=ANY_SCRIPT if self.resident else target,
            given=self.arguments,
            nodes=self.nodes,
            slots=self.slots,
            seed=self.seed,
            conf=self.conf,
            patience=self.patience,
            step_pattern=self.step_pattern,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """What became of a schedule. skipped: faults that were not made, and why. notices: of those made that have a
    detector, in order. events: of all nodes. quiet: the undisturbed run as its events show it, if there was one."""

    schedule: Schedule
    outcome: Outcome
    verdict: Verdict
    skipped: tuple[tuple[Fault, str], ...]
    notices: tuple[Notice, ...]
    events: tuple[Event, ...] = ()
    quiet: Picture | None = None

    @property
    def kept(self) -> bool:
        """Whether every promise held, as far as faults were made."""
        return self.verdict.kept

    def document(self) -> dict[str, Any]:
        """Return it as the one JSON document that `elastic3d chaos run --json` prints."""
        return {
            "schema": SCHEMA,
            "kept": self.kept,
            "made": [str(fault) for fault, _ in self.outcome.made],
            "skipped": [{"fault": str(fault), "why": why} for fault, why in self.skipped],
            "inexact": [str(fault) for fault in self.schedule.inexact],
            "noticed": [
                {"fault": str(notice.fault), "by": notice.detector, "after": _rounded(notice.after)}
                for notice in self.notices
            ],
            "tolerance": self.verdict.tolerance,
            "same_losses": self.verdict.same_losses,
            "broken": list(self.verdict.broken),
            "promises": [{**to_json(promise), "held": promise.held} for promise in self.verdict.promises],
            **history_document(self.outcome, self.verdict),
        }


def play_storm(
    schedule: Schedule, job: Job, *, workdir: Path, kept: Path, console: Console, compare: bool = True
) -> Storm:
    """Play the undisturbed job, unless `kept` has it, then the job with the schedule; judge the one by the other.

    compare: with False the undisturbed job is not played, and steps of the schedule are not checked beforehand.
    UsageError where the schedule cannot happen to this job, and where nothing can be written into `kept`.
    """
    setting = job.setting()
    check(schedule.faults, nodes=job.nodes, slots=job.slots)
    for fault in schedule.faults:
        if isinstance(fault, KillBelow) and fault.timeout >= job.patience:
            raise UsageError(
                f"{fault}: the job is given up before, after --patience {job.patience:g}; give more of that"
            )
    if not job.resident:
        check_restart(schedule.faults)
    makes, skipped = feasible(
        schedule.faults,
        slots=job.slots,
        faulty=job.faulty,
        loopback=job.loopback,
    )
    for fault, why in skipped:
        console.print(f"skipped: {fault}: {why}", style="yellow", markup=False)
    if not makes:
        raise UsageError("nothing is left of the schedule that can be made here")
    writable_folder(kept)
    workdir.mkdir(parents=True, exist_ok=True)
    quiet = None
    if compare:
        setting, quiet = undisturbed(job, workdir=workdir, kept=kept, console=console)
        check(schedule.faults, nodes=job.nodes, steps=setting.steps or None, slots=job.slots)
        if not job.resident:
            check_restart(schedule.faults, steps=setting.steps)
        if job.tolerance is not None and not tells_losses(quiet.picture.steps):
            raise UsageError(f"--tolerance: {setting.target.name} tells no loss; have it print `step 12 loss 0.25`")
    with ClosingStack() as stack:
        needs = {need for fault in makes for need in fault.ABOUT.needs}
        network = stack.enter_context(Network()) if job.on_hosts else None
        also = "" if network is None else network.address
        password, quota = PASSWORD if Need.PASSWORD in needs else None, QUOTA if Need.QUOTA in needs else None
        tls = Need.CERTIFICATES in needs
        etcd = stack.enter_context(
            EtcdCluster(3, also=also, password=password, quota=quota, tls=tls, client_certificates=tls)
            if Need.MEMBERS in needs
            else EtcdServer(also=also, password=password, quota=quota, tls=tls, client_certificates=tls)
        )
        setting = replace(setting, network=network)
        if password is not None:
            file = workdir / "etcd-password"
            file.write_text(password)
            setting = replace(setting, conf={**setting.conf, "user": "root", "password_file": str(file)})
        if etcd.certificates is not None:
            files = etcd.certificates
            pem = {"ca": str(files.ca), "cert": str(files.client), "key": str(files.client_key)}
            setting = replace(setting, conf={**setting.conf, **pem})
        if Need.COMPILER in needs:
            setting = replace(setting, clocks=stack.enter_context(Clocks()))
        if any({Need.FUSE, Need.SCRIPT} <= fault.ABOUT.needs for fault in makes):
            hung = stack.enter_context(HungFiles(workdir / "hung"))
            setting = replace(setting, given=(*setting.given, f"--hung={hung.folder}"), hung=hung)
        if Need.MOUNTS in needs:
            disk = stack.enter_context(SmallDisk(workdir / "disk"))
            setting = replace(setting, store=disk.folder.as_uri(), disk=disk)
        if Need.S3 in needs:
            url, proxy = stack.enter_context(proxied_store(host=also or LOOPBACK))
            setting = replace(setting, store=url, proxy=proxy)
        title = f"The job: {', '.join(map(str, makes))}"
        outcome = play_watched(setting, makes, etcd, workdir / "job", title, console, name="chaos")
    outcome = _without_unmet(outcome)
    missing = (*(fault for fault, _ in skipped), *outcome.unmet, *outcome.late)
    outcome, waiting = _without_what_waited(outcome, missing)
    skipped = (*skipped, *((fault, "its moment never came, to which what is skipped may lead") for fault in waiting))
    skipped = (*skipped, *_missed(outcome))
    if quiet is not None and any(fault.LEAVES_OUT for fault in makes):
        knowing = replace(job, arguments=(*job.arguments, *left_out(outcome.events)))
        _, quiet = undisturbed(knowing, workdir=workdir / "without", kept=kept, console=console)
    if quiet is None and outcome.picture.steps:
        outcome = replace(outcome, setting=known_steps(setting, outcome))
    noticed = tuple(one for one in notices(outcome, outcome.events) if job.resident or one.detector in EVENTS)
    if job.resident:
        verdict = judge(outcome, quiet, all_known=all_is_known(job.arguments), tolerance=job.tolerance)
    else:
        verdict = judge_restart(outcome, quiet, tolerance=job.tolerance)
    return Storm(
        schedule=schedule,
        outcome=outcome,
        verdict=verdict.with_promises(bars.promises(outcome, noticed, job.asked())),
        skipped=skipped,
        notices=noticed,
        events=outcome.events,
        quiet=None if quiet is None else quiet.picture,
    )


def _without_what_waited(outcome: Outcome, skipped: Sequence[Fault]) -> tuple[Outcome, tuple[Fault, ...]]:
    """Return the outcome without the faults whose moment may never have come for what was skipped, and these."""
    causes, undone = [*skipped], outcome.undone
    while waiting := [fault for fault in undone if may_be_why(causes, fault, outcome.picture)]:
        # What waits for one that waits was kept from it as well.
        causes += waiting
        undone = tuple(fault for fault in undone if fault not in waiting)
    excused = tuple(fault for fault in outcome.undone if fault not in undone)
    faults = tuple(fault for fault in outcome.faults if fault not in excused)
    return replace(outcome, faults=faults, undone=undone), excused


def _without_unmet(outcome: Outcome) -> Outcome:
    """Return the outcome with faults of the store that no request met among those that were not made."""
    pairs = [one for one in zip(outcome.made, outcome.hit, strict=True) if one[0][0] not in outcome.unmet]
    return replace(outcome, made=tuple(made for made, _ in pairs), hit=tuple(node for _, node in pairs))


def _missed(outcome: Outcome) -> Iterator[Skipped]:
    """Yield the faults that did not happen to the job though they could be made, and why."""
    yield from ((fault, "no request of the store met it") for fault in outcome.unmet)
    yield from ((fault, "the job had ended before it happened") for fault in outcome.late)
    ending = endings.of_job(outcome)
    if ending is not None:
        yield from ((fault, f"the job had to end before, by {ending.made.fault}") for fault in outcome.undone)


def left_out(events: Sequence[Event]) -> list[str]:
    """Return the options of `train_faulty.py` that leave out from the beginning what a job has left out."""
    said = [event for event in events if event.name in ("batch.excluded", "run.rolled_back")]
    excluded = {(int(first), int(stop)) for event in said for first, stop in event.fields["samples"]}
    return [f"--exclude={first}:{stop}" for first, stop in sorted(excluded)]


def undisturbed(job: Job, *, workdir: Path, kept: Path, console: Console) -> tuple[ScriptSetting, Outcome]:
    """Return the job, with how long it is, and its undisturbed run, which is played unless `kept` has it.

    UsageError where it fails by itself.
    """
    setting = job.setting()

    def played() -> Outcome:
        with ClosingStack() as stack:
            network = stack.enter_context(Network()) if job.on_hosts else None
            etcd = stack.enter_context(EtcdServer(also="" if network is None else network.address))
            hosted = replace(setting, network=network)
            return play_watched(hosted, (), etcd, workdir / "quiet", "The job undisturbed", console, name="quiet")

    quiet = quiet_run(setting, kept, played)
    if not sound(quiet):
        for name, log in list(quiet.logs.items())[:1]:
            console.print(f"The end of {name}'s log", log, sep="\n", markup=False, highlight=False)
    ends = ", ".join(f"{name} ended with {code}" for name, code in quiet.exit_codes.items() if code)
    if not ends:
        setting = known_steps(setting, quiet)
    if not sound(quiet):
        why = quiet.failure or ends or "it left no digest"
        hosts = "; if it needs the internet, give --loopback" if job.on_hosts else ""
        raise UsageError(f"{setting.target.name}: it fails undisturbed: {why}{hosts}")
    return setting, quiet


def seed_of(schedule: Schedule, job: Job) -> int:
    """Return the seed by which a run is named: its schedule's, or the job's where the schedule has none."""
    return job.seed if schedule.seed is None else schedule.seed


def keep(storm: Storm, job: Job, out: Path, workdir: Path) -> Path:
    """Write the folder of a storm below `out`, named by how it went and its seed, and return it.

    UsageError where that fails: there is no such folder then.
    """
    name = f"{'passed' if storm.kept else 'failed'}-{seed_of(storm.schedule, job)}"
    with whole_folder(out, name) as folder:
        write_job(folder, storm.schedule, job)
        (folder / VERDICT).write_text(json.dumps(storm.document(), indent=2) + "\n")
        (folder / "loss.svg").write_text(loss_plot(storm.outcome.picture, None))
        (folder / PICTURE).write_text(json.dumps(to_json(_facts(storm, job))) + "\n")
        write_report(folder)
        if not storm.kept:
            copy_logs(workdir, folder)
    return folder


def write_job(folder: Path, schedule: Schedule, job: Job) -> None:
    """Write into a folder what `kept_storm` reads."""
    (folder / SCHEDULE).write_text(to_toml(schedule))
    (folder / JOB).write_text(json.dumps({"schema": SCHEMA, **to_json(job)}, indent=2) + "\n")


def copy_logs(workdir: Path, folder: Path) -> None:
    """Copy the events and the agents' logs of the job that was played below `workdir` into a folder."""
    shutil.copytree(workdir / "job" / "events", folder / "events", dirs_exist_ok=True)
    for log in sorted((workdir / "job" / "nodes").glob("*/agent.log")):
        shutil.copy(log, folder / f"{log.parent.name}.log")


def _facts(storm: Storm, job: Job) -> RunFacts:
    quiet = () if storm.quiet is None else storm.quiet.steps
    shown = facts(
        storm.outcome,
        storm.verdict,
        storm.events,
        script=job.script,
        arguments=job.arguments,
        faults=storm.schedule.faults,
        skipped=storm.skipped,
        noticed=storm.notices,
        quiet=Points(steps=tuple(step.number for step in quiet), losses=tuple(step.loss for step in quiet)),
    )
    shown = replace(shown, drawn_from=storm.schedule.seed)
    return shown if job.resident else replace(shown, faults=tuple(map(as_restarted, shown.faults)))


def as_restarted(fact: FaultFact) -> FaultFact:
    """Return what is told of a fault where torchrun restarts the script: the catalogue speaks of `elastic3d.run`."""
    return replace(
        fact,
        promised="torchrun starts the script again where nodes or workers are lost, and the job ends well",
        page="guides/chaos.md",
        row="",
        detector=fact.detector if fact.detector in EVENTS else "",
        bar=0.0,
    )


def kept_storm(folder: Path) -> tuple[Schedule, Job]:
    """Return the schedule and the job of a folder that `keep` wrote; UsageError where it is none."""
    path = folder / JOB
    try:
        job = _job(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{folder}: it is no folder of a run: {JOB}: {error.strerror}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: it is no job: {error}") from None
    return load(folder / SCHEDULE, nodes=job.nodes), job


def _job(data: Any) -> Job:
    """Return the job of what `write_job` has written, or a person since; UsageError, ValueError or TypeError."""
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, got {data!r}")
    schema = data.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise UsageError(f"its schema is {schema}, and {SCHEMA} is known here")
    if unknown := sorted(data.keys() - {one.name for one in fields(Job)}):
        raise UsageError(f"a job has no {', '.join(unknown)}")
    return from_json(Job, data)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
