"""`elastic3d ckpt export --follow`: the checkpoints of a live run, each once, and none by half."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chaos.machine.processes import wait_until
from checkpointing import Store, fence, open_store
from checkpointing.errors import NotExportable
from checkpointing.interchange import Exported
from checkpointing.interchange.appearing import appearing
from checkpointing.reading import following
from checkpointing.reading.following import Follower
from checkpointing.reading.naming import committed, read_ref
from checkpointing.retention import collection, protection
from checkpointing.retention.policy import Retention
from elastic3d.cli.ckpt import app
from elastic3d.cli.ckpt.export_following import follow
from elastic3d.cli.ckpt.exporting import ExportFormat, ExportWish
from elastic3d.planner.shares import MeshSizes
from tests.cli.ckpt import scenes
from tests.training.damage import spoil_tiles

ONE = MeshSizes(dp=1)
TO = ["--to", "safetensors", "--follow", "--every", "0.05s"]
run = CliRunner()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store of a run that has made step 100."""
    made = open_store(str(tmp_path / "store"))
    fence(made, 1)
    scenes.save(made, 100, ONE)
    return made


def exported(store: Store, out: Path, *options: str, code: int = 0) -> tuple[list[Any], str]:
    """Return the lines of the command, and what it said besides."""
    result = run.invoke(app, ["export", store.url, str(out), *TO, *options, "--json"])
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def once(there: Path, work: Callable[[], object]) -> threading.Thread:
    """Begin the work in a thread when a path is there."""

    def wait() -> None:
        assert wait_until(there.exists, 60.0)
        work()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def folders(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name != "exported.jsonl")


def test_each_new_checkpoint_is_written_once(store: Store, tmp_path: Path) -> None:
    """From the newest on, in order, over restarts; what was removed meanwhile stays so."""
    out = tmp_path / "out"

    def go_on() -> None:
        scenes.save(store, 200, ONE)
        scenes.save(store, 300, ONE)

    work = once(out / "step-100", go_on)
    lines, _ = exported(store, out, "--until-step", "300")
    work.join()
    assert [(line["step"], line["kind"], line["schema"]) for line in lines] == [
        (step, "safetensors", 1) for step in (100, 200, 300)
    ]
    assert [line["target"] for line in lines] == [str(out / f"step-{step}") for step in (100, 200, 300)]
    for path in (out / "step-200").iterdir():
        path.unlink()
    (out / "step-200").rmdir()
    assert exported(store, out, "--until-step", "300")[0] == []
    scenes.save(store, 400, ONE)
    scenes.save(store, 500, ONE)
    lines, _ = exported(store, out, "--until-step", "500")
    assert [line["step"] for line in lines] == [400, 500]
    assert folders(out) == ["step-100", "step-300", "step-400", "step-500"]


def test_it_ends_after_one_that_is_late_enough(store: Store, tmp_path: Path) -> None:
    """Those up to the step are passed over; a restart has nothing to do."""
    work = once(tmp_path / "out" / "exported.jsonl", lambda: scenes.save(store, 200, ONE))
    lines, _ = exported(store, tmp_path / "out", "--once-after", "100")
    work.join()
    assert [line["step"] for line in lines] == [200]
    assert exported(store, tmp_path / "out", "--once-after", "100")[0] == []


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """Return a list with an entry for each look at the ref that was begun."""
    begun: list[Store] = []
    monkeypatch.setattr(following, "read_ref", lambda store: (begun.append(store), read_ref(store))[1])
    return begun


def look_in_vain(looks: list[Store]) -> None:
    """Wait until some looks that begin from now on have ended."""
    before = len(looks)
    assert wait_until(lambda: len(looks) > before + 3, 60.0)


def test_it_waits_for_what_the_ref_says(store: Store, tmp_path: Path, looks: list[Store]) -> None:
    """Nothing is verified yet: that is said once, and each that is verified is written."""

    def verify_all() -> None:
        look_in_vain(looks)
        scenes.save(store, 200, ONE)
        protection.mark_verified(store, "200")

    work = once(tmp_path / "out" / "exported.jsonl", verify_all)
    lines, said = exported(store, tmp_path / "out", "--of", "verified", "--until-step", "200")
    work.join()
    assert [line["step"] for line in lines] == [200]
    assert said.count("no checkpoint is verified") == 1
    assert said.count("there is a checkpoint now") == 1


def test_a_store_that_is_away_is_waited_for(store: Store, tmp_path: Path, looks: list[Store]) -> None:
    """It is said once that it is, and once that it is back."""
    place, aside, out = tmp_path / "store", tmp_path / "aside", tmp_path / "out"

    def be_away() -> None:
        place.rename(aside)
        look_in_vain(looks)
        aside.rename(place)
        scenes.save(store, 200, ONE)

    work = once(out / "step-100", be_away)
    lines, said = exported(store, out, "--until-step", "200")
    work.join()
    assert [line["step"] for line in lines] == [100, 200]
    assert said.count("does not answer, and is waited for") == 1
    assert said.count("answers again") == 1


def test_steps_that_are_made_again_are_written_again(store: Store, tmp_path: Path) -> None:
    """Another generation's step 100 is another state, and lies beside the first."""
    out = tmp_path / "out"
    exported(store, out, "--until-step", "100")
    fence(store, 2)
    scenes.save(store, 100, ONE, made_in=2)
    scenes.save(store, 200, ONE, made_in=2)
    assert [line["step"] for line in exported(store, out, "--until-step", "200")[0]] == [100, 200]
    assert folders(out) == ["step-100", "step-100-generation-2", "step-200"]


def test_what_a_killed_process_left_is_put_in_order(store: Store, tmp_path: Path) -> None:
    """What it had begun is removed, and one that had just appeared is known; lines that were cut short are nothing."""
    out = tmp_path / "out"
    (out / ".step-100.0a1b2c3d").mkdir(parents=True)
    (out / ".step-100.0a1b2c3d" / "model.safetensors").touch()
    (out / ".other").mkdir()
    (out / "exported.jsonl").write_text('{"checkpoint": "0000')
    (name,) = committed(store, read_ref(store))
    assert len(exported(store, out, "--until-step", "100")[0]) == 1
    assert folders(out) == [".other", "step-100"]
    text = (out / "exported.jsonl").read_text().splitlines()
    assert [json.loads(line)["state"] for line in text[1:]] == ["begun", "done"]
    (out / "exported.jsonl").write_text(text[1] + "\n")
    assert exported(store, out, "--until-step", "100")[0] == [], name
    (out / "step-100").rename(out / "gone")
    assert len(exported(store, out, "--until-step", "100")[0]) == 1, "it had been begun and was never there"


def test_a_damaged_checkpoint_is_passed_over(store: Store, tmp_path: Path) -> None:
    """It is named, nothing is left of it, the next one is written, and the exit code says so."""
    spoil_tiles(store, 100, older=())
    out = tmp_path / "out"

    def save_later() -> None:
        assert wait_until(lambda: b"begun" in (out / "exported.jsonl").read_bytes(), 60.0)
        scenes.save(store, 200, ONE)

    work = once(tmp_path / "out" / "exported.jsonl", save_later)
    lines, said = exported(store, tmp_path / "out", "--until-step", "200", code=1)
    work.join()
    assert [line["step"] for line in lines] == [200]
    assert said.count("is passed over") == 1
    assert folders(tmp_path / "out") == ["step-200"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting(ExportWish):
    """While a checkpoint is being written, the run makes two more, keeps the newest alone, and deletes the others."""

    store: Store

    def write(self, opened: Any, target: Path, advance: Any) -> Exported:
        for step in (200, 300):
            scenes.save(self.store, step, ONE)
        done = collection.collect(self.store, Retention(keep_last=1), grace=0.0, wait=True)
        assert done.objects, "the one between is deleted"
        return ExportWish.write(self, opened, target, advance)


def test_what_is_being_written_is_not_collected(store: Store, tmp_path: Path) -> None:
    """However short the grace: the command has announced what it reads before it reads it."""
    wish = Collecting(store=store, kind=ExportFormat.SAFETENSORS, prefix=None, config=None, shard_bytes=None)
    out = tmp_path / "out"
    follow(store, "latest", out, wish, every=0.05, once_after=-1, until_step=None, as_json=True)
    assert folders(out) == ["step-100"]
    assert (out / "step-100" / "model.safetensors").stat().st_size > scenes.BYTES


def test_whatever_ends_a_write_nothing_is_left(tmp_path: Path) -> None:
    """Ctrl-C, too; and a full disk is said to be the reason."""
    for error, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), NotExportable)):
        with pytest.raises(raised):
            fail(tmp_path / "out", error)
        assert list(tmp_path.iterdir()) == []


def fail(target: Path, error: BaseException) -> None:
    with appearing(target) as partial:
        partial.mkdir()
        (partial / "file").write_text("half")
        raise error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(number: signal.Signals, store: Store, tmp_path: Path) -> None:
    """With code 130, and what was written stays."""
    call = "from elastic3d.cli.ckpt import app; app()"
    command = [sys.executable, "-c", call, "export", store.url, str(tmp_path / "out"), *TO]
    # Shells have what they start in the background ignore Ctrl-C.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, preexec_fn=heard, **piped)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 100: ")
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, said) == (130, "elastic3d: stopped; nothing half-written is left\n")
    assert folders(tmp_path / "out") == ["step-100"]


def test_wrong_calls_are_said_at_once(store: Store, tmp_path: Path) -> None:
    """In one line each, before anything is waited for."""
    out = str(tmp_path / "out")

    def said(*options: str, url: str = store.url) -> str:
        result = run.invoke(app, ["export", url, *options])
        assert (result.exit_code in (1, 2), result.stderr.count("\n")) == (True, 1), result.output
        return result.stderr

    assert "give --to" in said(out, "--follow")
    assert "stays where it is" in said(out, *TO, "--of", "100")
    assert "give --follow too" in said(out, "--to", "dcp", "--until-step", "3")
    assert "--every" in said(out, "--to", "dcp", "--follow", "--every", "often")
    (tmp_path / "file").touch()
    assert "is no folder" in said(str(tmp_path / "file"), *TO)
    assert "no such directory" in said(out, *TO, url=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="cannot be followed"):
        Follower(store, "best", every=1.0, say=print)


def test_one_folder_is_one_commands(store: Store, tmp_path: Path) -> None:
    """Two would write the same checkpoints twice."""
    from elastic3d.cli.ckpt.exported import ExportFolder

    with ExportFolder(tmp_path / "out", store.url, ""):
        assert "another command" in exported(store, tmp_path / "out", code=2)[1]
