"""Every command of the documentation is run by a test, or listed with the reason why not; here, over a small job."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.machine.cluster import Cluster, Launch
from chaos.playing.setting import TRAIN_GPT
from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application
from tests.docs.commands_run import ELSEWHERE, HERE, NOT_RUN, NOWHERE
from tests.docs.test_commands import PAGES, commands, program, shown
from tests.paths import ROOT

RUN, STEPS = "gpt-1b", 20
STORES = re.compile(r"(s3://bucket/gpt-1b|file:///data/gpt-1b|/data/run-[78]|checkpoints|demo/demo-\w+)")
EVENTS = re.compile(r"(/data/gpt-1b/events|/tmp/events|events)")
ENDPOINTS = re.compile(r"(e1|127\.0\.0\.1):\d+(,e\d:2379)*")
OLDER = ("10", "1000")
TAKEN = {"1200": "20", "30": "20", "model/embed.weight": "model/head.weight"}
"""Steps and tensors of the documentation's checkpoints, and those that the job has; an `OLDER` one is its oldest."""

NOTHING_FOUND = 1
"""How `explain` ends where nothing went wrong."""

LIVE = ("status", "events", "top", "explain")
"""Commands that look at a job in etcd, where they are not given event files; some lines leave out where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a job that is over has left."""

    store: Path
    events: Path
    endpoint: str

    @property
    def older(self) -> str:
        """The step of its oldest checkpoint: which ones are made depends on how long the store takes."""
        listed = CliRunner().invoke(application(), ["ckpt", "ls", str(self.store), "--json"])
        return str(min(one["step"] for one in json.loads(listed.stdout)["checkpoints"]))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Train a small model on two nodes; etcd is there until the end."""
    folder = tmp_path_factory.mktemp("job")
    sizes = ("--width=32", "--blocks=4", "--context=32", "--global-batch=4", "--micro-batch=2")
    with EtcdServer() as server:
        launch = Launch(
            run_id=RUN,
            endpoint=server.endpoint,
            script=TRAIN_GPT,
            script_args=(
                *(f"--steps={STEPS}", *sizes, "--checkpoint-every=2"),
                *(f"--store={folder / 'store'}", f"--events={folder / 'events'}"),
            ),
            min_nodes=2,
            max_nodes=2,
            conf={"mode": "resident"},
        )
        with Cluster(launch, folder / "nodes") as cluster:
            for name in ("node0", "node1"):
                cluster.start_node(name)
            codes = cluster.wait(200)
            assert set(codes.values()) == {0}, "\n".join(cluster.tail(name) for name in codes)
        yield Job(store=folder / "store", events=folder / "events", endpoint=server.endpoint)


def lines() -> dict[str, dict[str, list[str]]]:
    """Return the documentation's lines by their command: each as it is printed, with its words after the command."""
    said: dict[str, dict[str, list[str]]] = {}
    for page in PAGES:
        for words in filter(shown, commands(page, "elastic3d")):
            command, rest = program(), words[1:]
            path: list[str] = []
            while rest and rest[0] in getattr(command, "commands", {}):
                path.append(rest[0])
                command, rest = command.commands[rest[0]], rest[1:]
            if path:
                said.setdefault(" ".join(path), {})[shlex.join(words)] = rest
    return said


def test_every_command_of_the_documentation_is_in_the_table_once() -> None:
    """And what is in the table is in the documentation; files that run commands are there, and name them."""
    listed = [*HERE, *ELSEWHERE, *NOWHERE]
    assert len(listed) == len({*listed})
    assert {*listed} == {*lines()}
    for command, place in ELSEWHERE.items():
        assert command.split()[-1] in (ROOT / place).read_text(), f"{place} does not say {command}"
    printed = [line for command in HERE for line in lines()[command]]
    for words in NOT_RUN:
        assert any(words in line for line in printed), f"no line has {words!r} any more"


def replaced(command: str, rest: list[str], job: Job) -> list[str]:
    """Return a line's words with the job's own places, steps and names."""
    words = []
    for before, word in zip(["", *rest], rest, strict=False):
        if command != "init" and STORES.fullmatch(word.partition("@")[0]):
            word = str(job.store)
        elif EVENTS.fullmatch(word):
            word = str(job.events)
        elif ENDPOINTS.fullmatch(word):
            word = job.endpoint
        elif before == "--id":
            word = RUN
        elif command.startswith(("ckpt", "samples")) and (before == "--of" or not before.startswith("-")):
            word = job.older if word in OLDER else TAKEN.get(word, word)
        words.append(word)
    if command in LIVE and "--events" not in words:
        words += [] if "--endpoint" in words else ["--endpoint", job.endpoint]
        words += [] if "--id" in words else ["--id", RUN]
    if command == "top" and not {"--once", "--json"} & {*words}:
        words.append("--once")
    return words


@pytest.mark.etcd
@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_lines_of_the_documentation_end_well(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever copies one, and puts in the places of a job of their own, is not refused."""
    runner, failed, ran = CliRunner(), [], 0
    for command in HERE:
        for line, rest in lines()[command].items():
            if any(words in line for words in NOT_RUN):
                continue
            words = [*command.split(), *replaced(command, rest, job)]
            folder = tmp_path / str(ran)
            (folder / "out").mkdir(parents=True)
            monkeypatch.chdir(folder)
            ended = runner.invoke(application(), words)
            ran += 1
            if ended.exit_code != (NOTHING_FOUND if command == "explain" else 0):
                failed.append(
                    f"{line}\n  as {shlex.join(words)}\n  ended with {ended.exit_code}: {ended.output[-300:]}"
                )
    assert not failed, "\n".join(failed)
    assert ran > 60
