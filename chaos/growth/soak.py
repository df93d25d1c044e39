"""One long job with a fault every few seconds, until time is over or something breaks, sampled all the while.

Faults are drawn one at a time, for the step that the job will have reached `every` seconds after the last one at the
pace of its latest steps: they happen at steps, as in any history. A node that joins is a fresh one with a name of its
own, as where machines are taken and others come. A script of ours stops at a step that it is told of; anybody else's
that has not ended by itself is ended like a scheduler ends it, and then nothing is asked of its end.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaos.faults.fault import Fault, OfNode, node_name
from chaos.faults.moment import When
from chaos.growth.account import Account, Known
from chaos.growth.draws import DEFAULT, Draws
from chaos.growth.sampling import Sample, etcd_sample, folder, processes, servers
from chaos.judging.oracle import WHOLE, all_is_known, judge, of_one_that_was_ended
from chaos.judging.promise import Promise
from chaos.machine.closing import ClosingStack
from chaos.machine.cluster import started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.playing.outcome import Outcome
from chaos.playing.own_script import ScriptSetting, known_steps
from chaos.playing.play import Player
from chaos.playing.setting import Setting
from chaos.playing.standing import Standing
from chaos.report.early import in_a_line
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM, Clock
from elastic3d.etcd import EtcdClient

TRAIN_SOAK = Path(__file__).parents[1] / "scripts" / "train_soak.py"
_TICK = 0.05
# A machine that is lost again and again is kept out, for longer each time: here it is lost on purpose.
_CONF = {"flaps": "0"}
_PACE_OF = 30
"""Steps of which the pace is taken."""
_AHEAD_SECONDS, _AHEAD_STEPS = 10.0, 20
"""How far ahead the last step is chosen, so that no rank reaches it before all know of it."""
_WAITED, _INTERVALS = 60.0, 3.0
"""Seconds, and times as long as between two faults, for which one waits for its node."""
_REMEMBERED = 120.0
"""Seconds for which the picture needs to know what was done to the job."""
_SAMPLES = 5000
"""Samples of a run, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a soak is. seconds: how long faults are made, from the first step on.

    every: seconds between two. script: anybody's, None for ours. words: the faults, as `check_words` has let
    through. leave: seconds in which nodes that are told to have to end. given: the script's own arguments. sample:
    seconds between two samples at least; long runs take them further apart. patience: seconds without an event
    until it is given up. pace: slept between two steps of our script.
    """

    seconds: float
    every: float = 20.0
    nodes: int = 3
    seed: int = 7
    words: tuple[str, ...] = DEFAULT
    script: Path | None = None
    given: tuple[str, ...] = ()
    sample: float = 3.0
    patience: float = 180.0
    pace: float = 0.1
    leave: float = 120.0

    def setting(self, end: Path) -> Setting:
        """Return the job. end: the file that tells a script of ours its last step."""
        if self.script is not None:
            return ScriptSetting(
                target=self.script,
                given=self.given,
                nodes=self.nodes,
                seed=self.seed,
                patience=self.patience,
                conf=_CONF,
            )
        return SoakSetting(
            nodes=self.nodes,
            steps=0,
            seed=self.seed,
            width=32,
            blocks=4,
            context=32,
            patience=self.patience,
            conf=_CONF,
            options=(f"--end={end}", f"--pace={self.pace}", *self.given),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSetting(Setting):
    """A job of `train_soak`, or of a script that takes the same arguments."""

    script: Path = TRAIN_SOAK


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What a soak has shown. made: the faults, each at the step at which it was made, and when.

    promises: those that were judged, none where it was interrupted. trained: seconds in which faults were made.
    stopped: why it ended otherwise than it was asked to at its time, "" if it did not. interrupted: by the number of a
    signal, 0 if it was not. error: what else ended it, "" for nothing. logs: by node, the end of what an agent printed
    that ended as it should not have. began: by the wall clock.
    """

    plan: Plan
    samples: tuple[Sample, ...]
    made: tuple[tuple[Fault, float], ...]
    promises: tuple[Promise, ...]
    trained: float
    seconds: float
    steps: int
    generations: Mapping[int, Known] = field(default_factory=dict)
    digest: str | None = None
    stopped: str = ""
    interrupted: int = 0
    error: str = ""
    logs: Mapping[str, str] = field(default_factory=dict)
    began: float = 0.0

    @property
    def broken(self) -> tuple[str, ...]:
        """What speaks against promises, each with what was promised, and by which page."""
        return tuple(text for promise in self.promises for text in promise.told)


Heard = Callable[[str], object]
"""Told, in a line each, what happens."""
Sampled = Callable[[Sample], object]
"""Given each sample once it is taken."""


def play_soak(
    plan: Plan,
    *,
    workdir: Path,
    heard: Heard = print,
    sampled: Sampled = lambda sample: None,
    settled: Callable[[], object] = lambda: None,
    clock: Clock = SYSTEM,
) -> Soak:
    """Play a soak under `workdir`, with an etcd of its own.

    One that a signal or an error ends is returned as far as it came. settled: called once nothing is left to be
    measured, and no signal may interrupt what comes any more.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    end = workdir / "end"
    began = clock.monotonic()
    with ClosingStack() as stack:
        # Fresh nodes come all the time: their imports would take the processors from the job.
        stack.enter_context(started_by(stack.enter_context(PreloadedServer())))
        # Before 3.6 it keeps 100,000 writes in memory: for as long as there are fewer, it grows by design.
        etcd = stack.enter_context(EtcdServer(options=("--snapshot-count=1000",)))
        client = stack.enter_context(etcd.client())
        player = _Soaked(plan, plan.setting(end), etcd, client, workdir / "job", end, heard, sampled, clock)
        stack.enter_context(player.cluster)
        interrupted, error, failure = 0, "", ""
        outcome = None
        try:
            with player.undone():
                failure = player.run()
            # One that is drawn ahead of its moment was never due.
            player.waiting.clear()
            outcome = player.outcome([fault for fault, _ in player.made], failure)
        except SystemExit as asked:
            # Whoever caught the signal lets no second one through: what was measured can be told.
            interrupted, failure = int(asked.code or 1) - 128, "interrupted"
        except Exception as ended:  # noqa: BLE001 - whatever ends it, hours of samples are told
            heard(traceback.format_exc())
            error = failure = in_a_line(ended)
        settled()
        if outcome is None:
            # Without what takes time: nothing is asked of the end of one that has failed.
            player.waiting.clear()
            outcome = player.outcome([fault for fault, _ in player.made], failure)
    return Soak(
        plan=plan,
        samples=tuple(player.samples),
        made=tuple(player.made),
        promises=() if interrupted or error else _promises(player, outcome),
        trained=player.trained,
        seconds=clock.monotonic() - began,
        steps=player.picture.step,
        generations=player.account.generations,
        digest=outcome.digest,
        stopped=player.stopped or failure,
        interrupted=interrupted,
        error=error,
        logs=outcome.logs,
        began=player.began_at,
    )


def _promises(player: _Soaked, outcome: Outcome) -> tuple[Promise, ...]:
    picture = player.account.whole()
    outcome = replace(outcome, picture=picture, events=player.account.noted)
    if not picture.steps:
        nothing = (outcome.failure or "the job made no step",)
        return (Promise(says=WHOLE, page="reference/failures.md", seen="", broken=nothing),)
    setting = outcome.setting
    if isinstance(setting, ScriptSetting):
        outcome = replace(outcome, setting=known_steps(setting, outcome))
    else:
        outcome = replace(outcome, setting=replace(setting, steps=player.last or picture.step))
    if player.dismissed:
        # What nodes say of each other once all of them were told to end is of that.
        lost = tuple(one for one in picture.lost if one.at < player.asked_at)
        accused = tuple(one for one in picture.accused if one.at < player.asked_at)
        outcome = replace(outcome, digest="", store="", picture=replace(picture, lost=lost, accused=accused))
    # Of steps so old that the judge has them as one.
    old = tuple(player.account.broken)
    settled = Promise(says="every sample is consumed once", page="guides/scripts.md", seen="", broken=old)
    known = all_is_known(player.plan.given)
    if player.broke:
        # Whoever still ran then has no exit code.
        codes = {name: code for name, code in outcome.exit_codes.items() if code is not None}
        outcome = replace(outcome, exit_codes=codes)
    promises = judge(outcome, all_known=known).promises
    if player.broke:
        promises = tuple(of_one_that_was_ended(promises, player.broke))
    return (*([settled] if old else []), *promises)


class _Soaked(Player):
    def __init__(
        self,
        plan: Plan,
        setting: Setting,
        etcd: EtcdServer,
        client: EtcdClient,
        workdir: Path,
        end: Path,
        heard: Heard,
        sampled: Sampled,
        clock: Clock,
    ) -> None:
        super().__init__(setting, (), etcd, workdir, "soak", None, clock, among=(1, plan.nodes))
        self.plan, self.account, self.samples = plan, Account(), list[Sample]()
        self.last, self.stopped, self.dismissed, self.broke = 0, "", False, ""
        self.trained = 0.0
        self._client, self._end, self._heard, self._hand_on = client, end, heard, sampled
        self._draws = Draws(plan.seed, plan.words, plan.nodes)
        self._joined = plan.nodes
        self.began_at = clock.wall()
        self._told = 0
        self._asked = self.asked_at = 0.0
        self._due = clock.monotonic()
        self._began = self._sampled = self._trained = clock.monotonic()
        self._each = max(plan.sample, plan.seconds / _SAMPLES)

    def run(self) -> str:
        """Play until time is over or something breaks; return what, "" for nothing."""
        for number in range(self.setting.nodes):
            self.start(node_name(number))
        standing = Standing.since(self.clock.monotonic(), self.setting.patience)
        while True:
            running = set(self.cluster.running())
            new = self.follower.poll()
            now = self.clock.monotonic()
            standing.hear(new, now)
            if new:
                lately = [one for one in self.injections if one.at > self.clock.wall() - _REMEMBERED]
                self.account.hear(new, lately)
                self.picture = self.account.picture
                self.see_ports_after(new)
            if wrong := self.account.wrong or self._lost():
                self.broke = wrong
                return wrong
            self.inject()
            self._tell()
            self._clean()
            if not running and not new:
                return self._all_ended()
            if why := standing.why(self.picture, running, now):
                return why
            if self.dismissed and (lasting := self._dismiss(running, now)):
                return lasting
            if not self._ending:
                self._go_on(now)
            self.clock.sleep(_TICK)

    def release(self, word: str) -> None:
        """Start a fresh node."""
        name = node_name(self._joined)
        self._joined += 1
        self.note("join", name)
        self.start(name)

    @property
    def _ending(self) -> bool:
        return bool(self.last) or self.dismissed

    def _go_on(self, now: float) -> None:
        """Take a sample if it is time; draw the next fault once the last one is made; end it when time is over."""
        if not self.picture.step:
            self._trained = now
        self.trained = now - self._trained
        if now - self._trained >= self.plan.seconds:
            self.waiting.clear()
            self._ask_to_end()
            return
        if now - self._sampled >= self._each or (self.picture.step and not self.samples):
            self._sampled = now
            sample = self._sample(now - self._began)
            self.samples.append(sample)
            self._hand_on(sample)
        pace = self._pace()
        if not self.waiting and pace:
            fault = self._draws.draw(self.picture.step + max(1, round(self.plan.every / pace)))
            self.waiting.append(fault)

    @property
    def has_saved(self) -> bool:
        """Whether the job has committed any checkpoint, in all its hours."""
        return bool(self.account.whole().checkpoints)

    def inject(self) -> None:
        """Make what is due. What happens to a node waits until it trains."""
        view = self.picture.generation
        waiting = self.waiting
        early = [
            fault
            for fault in waiting
            if isinstance(fault, OfNode) and (view is None or fault.node not in view.nodes or not view.first_step)
        ]
        self.waiting = [fault for fault in waiting if fault not in early]
        early = [fault for fault in early if not self._in_vain(fault)]
        before = len(self.made)
        super().inject()
        # It may have waited for its node: whoever plays it again has the step at which it was made.
        now = When(step=self.picture.step)
        self.made[before:] = [(replace(fault, when=now), at) for fault, at in self.made[before:]]
        self.waiting += early

    def _in_vain(self, fault: Fault) -> bool:
        """Return whether a fault has waited for its node for too long, which is told: a spare may never train."""
        now = self.clock.monotonic()
        if not fault.when.come(self.picture):
            self._due = now
        if now - self._due <= max(_WAITED, _INTERVALS * self.plan.every):
            return False
        self._draws.take_back(fault)
        self._heard(f"{now - self._began:7.0f} s  left out, since its node trains in no generation: {fault}")
        return True

    def _pace(self) -> float:
        """Return the seconds between two of the latest steps, 0 while there are too few in this generation."""
        view = self.picture.generation
        number = view.number if view is not None else 0
        steps = [step.at for step in self.picture.steps[-_PACE_OF:] if step.generation == number]
        gaps = [late - early for early, late in itertools.pairwise(steps)]
        return max(1e-3, statistics.median(gaps)) if len(gaps) >= 3 else 0.0

    def _ask_to_end(self) -> None:
        if self.plan.script is not None:
            self.dismissed, self._asked, self.asked_at = True, self.clock.monotonic(), self.clock.wall()
            self.stopped = f"the script had not ended by itself after step {self.picture.step}"
            return
        ahead = max(_AHEAD_STEPS, round(_AHEAD_SECONDS / (self._pace() or self.plan.pace)))
        self.last = self.picture.step + ahead
        unfinished = self._end.with_suffix(".part")
        unfinished.write_text(str(self.last))
        os.replace(unfinished, self._end)

    def _dismiss(self, running: Iterable[str], now: float) -> str:
        """Tell nodes that run to end, also one that has come since; return which are still there after their time."""
        dismissed = {node.name for node in self.cluster.nodes if node.dismissed}
        for name in running:
            if name not in dismissed:
                self.cluster.terminate_node(name)
        if not running or now - self._asked <= self.plan.leave:
            return ""
        return (
            f"{', '.join(sorted(running))} still run {self.plan.leave:.0f} s after the script's time was over and they "
            "were told to end: its steps are longer, or it hangs; give it more time between faults, or end it by itself"
        )

    def _lost(self) -> str:
        """Return which node has ended that nobody took, "" for none."""
        ended = [node for node in self.cluster.nodes if node.process.returncode and not (node.killed or node.dismissed)]
        return f"{ended[0].name} ended with exit code {ended[0].process.returncode}" if ended else ""

    def _all_ended(self) -> str:
        if self._ending:
            return ""
        if self.plan.script is None:
            return "all nodes ended before they were asked to"
        self.waiting.clear()
        self.stopped = f"the script ended by itself after step {self.picture.step}"
        return ""

    def _sample(self, at: float) -> Sample:
        view = self.picture.generation
        assert isinstance(self.etcd, EtcdServer)
        return Sample(
            at=round(at, 2),
            step=self.picture.step,
            generation=view.number if view else 0,
            processes=(*processes(self.cluster.nodes), *servers(self.etcd)),
            etcd=etcd_sample(self.etcd, self._client, self.root),
            store=folder(Path(self.store_folder)),
            events=folder(self.follower.folder),
        )

    def _tell(self) -> None:
        for fault, _ in self.made[self._told :]:
            view = self.picture.generation
            seconds = self.clock.monotonic() - self._began
            self._heard(f"{seconds:7.0f} s  generation {view.number if view else 0}: {fault}")
        self._told = len(self.made)

    def _clean(self) -> None:
        """Remove what killed nodes could not, as a machine that is gone takes its files with it."""
        for node in self.cluster.nodes:
            if node.killed and not node.alive and node.temp.exists():
                shutil.rmtree(node.temp, ignore_errors=True)
