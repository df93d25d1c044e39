"""Tags, pins, collection and repair from the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpointing import Distrust, mark_distrusted, mark_vetted, open_checkpoint, open_store, read_latest
from checkpointing.errors import NoCheckpoint
from checkpointing.retention.protection import mark_verified
from checkpointing.stores.address import split_name
from checkpointing.stores.local import LocalStore
from elastic3d.cli.ckpt import app
from elastic3d.cli.ckpt.naming import before, choose
from tests.cli.ckpt.conftest import History

run = CliRunner()


@pytest.fixture
def url(history: History, tmp_path: Path) -> str:
    """A copy of the run's store that may be changed."""
    shutil.copytree(history.url, tmp_path / "run")
    return str(tmp_path / "run")


def answer(*arguments: str, code: int = 0) -> Any:
    result = run.invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def refused(*arguments: str, code: int = 2) -> str:
    result = run.invoke(app, list(arguments))
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_tag_names_a_checkpoint(url: str, history: History) -> None:
    """It is listed, shown, completed, moved only on request, and removed."""
    assert answer("tag", url, "best", "200")["checkpoint"] == history.names[1]
    assert answer("tag", url)["tags"] == {"best": history.names[1]}
    assert answer("show", url, "best")["summary"]["labels"] == ["tag best"]
    assert "best" in refused("tag", url, "best", "300", code=1)
    assert answer("tag", url, "best", "300", "--move")["checkpoint"] == history.names[2]
    assert "tag best" in run.invoke(app, ["ls", url]).stdout
    answer("untag", url, "best")
    assert answer("tag", url)["tags"] == {}
    assert "no tag" in refused("untag", url, "best")
    assert "123" in refused("tag", url, "123", "200")
    assert "No tags" in run.invoke(app, ["tag", url]).stdout


def test_what_is_given_for_a_name_that_is_not_is_refused(url: str) -> None:
    """A script whose variable is empty, or a person who forgot the name, must not take a list for success."""
    assert "checkpoint '200' without a tag to give" in refused("tag", f"{url}@200")
    assert "checkpoint '200' without a tag to give" in refused("tag", url, "", "200")
    assert "--move without a tag to give" in refused("tag", url, "--move")
    assert "--reason without a checkpoint" in refused("pin", url, "--reason", "evaluation")
    assert answer("tag", url)["tags"] == answer("pin", url)["pins"] == {}


def test_pins_are_listed_with_their_reasons(url: str, history: History) -> None:
    """Until they are removed."""
    answer("pin", url, "100", "--reason", "evaluation")
    assert answer("pin", url)["pins"] == {history.names[0]: "evaluation"}
    assert "evaluation" in run.invoke(app, ["pin", url]).stdout
    assert answer("show", url, "100")["summary"]["labels"] == ["pinned"]
    answer("unpin", url, "100")
    assert answer("pin", url)["pins"] == {}
    assert "not pinned" in refused("unpin", url, "100")


def test_verified_names_a_checkpoint(url: str, history: History) -> None:
    """It is shown and can be given, once there is one."""
    refused("show", url, "verified", code=1)
    mark_verified(open_store(url), history.names[2])
    assert answer("show", url, "verified")["summary"]["checkpoint"] == history.names[2]
    assert answer("ls", url)["checkpoints"][1]["labels"] == ["verified"]


def test_vetted_and_distrusted_checkpoints_are_marked(url: str, history: History) -> None:
    """In lists and on the page; `vetted` may be given with the URL, and where there is none it is said why."""
    assert "audits are off" in refused("show", f"{url}@vetted", code=1)
    mark_vetted(open_store(url), history.names[0])
    mark_distrusted(open_store(url), [Distrust(before=99, step=200)])
    summary = answer("show", f"{url}@vetted")["summary"]
    assert (summary["checkpoint"], summary["labels"]) == (history.names[0], ["vetted"])
    labels = answer("log", url)["labels"]
    assert {name for name, marks in labels.items() if "distrusted" in marks} == set(history.names[2:])
    assert "distrusted" in run.invoke(app, ["log", url]).stdout
    assert "once" in refused("show", f"{url}@vetted", "200")
    assert "all of a store" in refused("ls", f"{url}@vetted")


def test_a_checkpoint_that_is_named_twice_is_refused(url: str) -> None:
    """Also where one of the two is what the command would take by itself: which of them is meant, nobody knows."""
    assert "@200 and 'latest': name the checkpoint once" in refused("tag", f"{url}@200", "best", "latest")
    assert "once" in refused("diff", f"{url}@300", "100", "latest")
    assert "once" in refused("cat", f"{url}@200", "model/head.weight", "--of", "latest")
    assert answer("tag", url)["tags"] == {}


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/run@vetted", "vetted"),
        ("/data/run-7@1200", "1200"),
        ("s3://user@host/run", ""),
        ("sftp://user@host", ""),
        ("/data/run", ""),
        ("@vetted", ""),
        ("/data/run@", ""),
    ],
)
def test_a_name_after_a_url_is_told_from_a_user(url: str, name: str) -> None:
    """What stands before a host, or in the middle of a path, names no checkpoint."""
    assert split_name(url) == (url.removesuffix(f"@{name}") if name else url, name)


def test_an_at_in_the_name_of_a_directory_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the directory is named: as it is, below the user's own in quotes, or as a URL."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run@2").mkdir()
    for url in (f"{tmp_path}/run@2", "~/run@2", f"file://{tmp_path}/run@2"):
        assert split_name(url) == (url, "")
        assert split_name(f"{url}@vetted") == (url, "vetted")
    assert split_name("~/run@3") == ("~/run", "3")


def test_gc_reports_what_it_would_free_and_frees_it(url: str, history: History) -> None:
    """--dry-run changes nothing; a tag keeps its checkpoint; the remaining ones are whole."""
    answer("tag", url, "first", "100")
    before = sorted(path for path in Path(url).rglob("*") if path.is_file())
    plan = answer("gc", url, "--keep-last", "1", "--grace", "1ms", "--dry-run")
    assert plan["dry_run"]
    assert sorted(plan["dropped"]) == history.names[1:3]
    assert plan["bytes"] > 69_304
    assert sorted(path for path in Path(url).rglob("*") if path.is_file()) == before
    assert "would free" in run.invoke(app, ["gc", url, "--keep-last", "1", "--grace", "1ms", "-n"]).stdout
    done = answer("gc", url, "--keep-last", "1", "--grace", "1ms")
    assert (sorted(done["dropped"]), done["objects"] > 0, done["waiting"]) == (history.names[1:3], True, 0)
    assert [row["step"] for row in answer("ls", url)["checkpoints"]] == [400, 100]
    assert answer("verify", url)["findings"] == []
    assert "collected since" in run.invoke(app, ["show", url], env={"COLUMNS": "120"}).stdout
    assert answer("du", url)["usage"]["unreferenced"] == 0


def test_who_may_only_read_is_told_what_gc_would_free(url: str, history: History) -> None:
    """A dry run tries out no writing; a collection does, and is refused."""
    shutil.rmtree(f"{url}/tmp", ignore_errors=True)
    Path(f"{url}/tmp").write_text("")  # keeps also root from writing objects
    assert sorted(answer("gc", url, "--keep-last", "1", "--grace", "1ms", "-n")["dropped"]) == history.names[:3]
    assert "cannot be written" in refused("gc", url, "--keep-last", "1")


def test_a_collection_that_ctrl_c_ends_is_gone_on_with_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how far it came, and nobody waits for it as for a collector that may still be deleting."""
    command = ["gc", url, "--keep-last", "1", "--grace", "1ms"]
    delete = LocalStore.delete

    def interrupted(store: LocalStore, name: str) -> None:
        if name.startswith("packs/"):
            raise KeyboardInterrupt
        delete(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", interrupted)
        said = refused(*command, code=130)
    assert "stopped: at least 0 of " in said
    assert "the same command goes on" in said
    assert answer(*command)["objects"] > 0
    assert answer("du", url)["usage"]["unreferenced"] == 0


def test_a_collection_that_a_signal_ends_in_its_grace_says_so(url: str) -> None:
    """What it has condemned stays condemned, for the next one."""
    for path in Path(url).rglob("*"):
        os.utime(path, (0, 0))  # older than the grace
    call = "from elastic3d.cli.ckpt import app; app()"
    command = [sys.executable, "-c", call, "gc", url, "--keep-last", "1", "--grace", "1h"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while (ref := read_latest(open_store(url))) is None or ref.sweeping is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    expected = "elastic3d: stopped before anything was deleted; the same command goes on from there\n"
    assert (process.returncode, out, said) == (130, "", expected)
    assert answer("gc", url, "--no-wait")["waiting"] > 0


def test_what_a_collection_drops_between_two_looks_is_said_to_be_gone(url: str, history: History) -> None:
    """A comparison had found it, and then asks what was committed before it."""
    store = open_store(url)
    chosen = choose(store, "200")
    assert before(store, chosen.name) == history.names[0]
    answer("gc", url, "--keep-last", "1", "--grace", "1ms")
    with pytest.raises(NoCheckpoint, match="a collection has just dropped it"):
        before(store, chosen.name)


def test_gc_keeps_a_store_within_a_size(url: str, history: History) -> None:
    """Protected checkpoints stay although they exceed it, and a message says so."""
    plan = answer("gc", url, "--keep-bytes", "50GiB", "--grace", "1ms", "-n")
    assert (plan["dropped"], plan["over"]) == ([], 0)
    done = answer("gc", url, "--keep-bytes", "1B", "--grace", "1ms")
    assert sorted(done["dropped"]) == history.names[:3]
    assert done["over"] > 0
    assert "more than --keep-bytes" in run.invoke(app, ["gc", url, "--keep-bytes", "1B", "--grace", "1ms"]).stdout
    assert "--keep-bytes" in refused("gc", url, "--keep-bytes", "50")


def test_repair_restores_a_damaged_ref(url: str, history: History) -> None:
    """The error of a damaged ref says what to do; after the repair all is there again; an intact ref is left alone."""

    def newest() -> Path:
        return max((Path(url) / "versions" / "refs" / "latest").iterdir(), key=lambda path: int(path.name))

    ref = newest()
    ref.write_bytes(ref.read_bytes()[:-1])
    assert "ckpt repair" in refused("ls", url, code=1)
    assert answer("repair", url)["checkpoint"] == history.names[3]
    assert [row["step"] for row in answer("ls", url)["checkpoints"]] == [400, 300, 200, 100]
    assert open_checkpoint(open_store(url, write=False)).step == 400
    newest().write_bytes(newest().read_bytes()[:-1])
    assert "below 2**63" in refused("repair", url, "--generation", str(1 << 63))
    assert answer("repair", url, "--generation", str((1 << 63) - 1))["generation"] == (1 << 63) - 1
    ref = newest()
    whole = ref.read_bytes()
    assert answer("repair", url)["committed"] == history.names[::-1]
    assert (newest(), ref.read_bytes()) == (ref, whole)
