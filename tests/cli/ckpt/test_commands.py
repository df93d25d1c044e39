"""The `ckpt` commands: what they read, what they print, and how they exit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from checkpointing import Store, open_checkpoint, open_store
from elastic3d.cli import application
from elastic3d.cli.ckpt import app
from elastic3d.cli.ckpt.place import StorePlace
from elastic3d.cli.ckpt.reading import cut
from elastic3d.errors import UsageError
from tests.cli.ckpt import scenes
from tests.cli.ckpt.conftest import History

run = CliRunner()
COMMANDS = (
    *("ls", "log", "show", "tree", "du", "stats", "diff", "plan", "provenance", "cat", "verify"),
    *("tag", "untag", "pin", "unpin", "gc", "repair", "import", "export"),
)
MANIFESTS_ONLY: dict[str, list[str]] = {
    "ls": [],
    "log": [],
    "show": ["200"],
    "tree": [],
    "du": [],
    "stats": [],
    "diff": ["100", "400"],
    "plan": ["--to", "pp=2,dp=3,tp=2"],
    "provenance": [],
}


def answer(*arguments: str, code: int = 0) -> Any:
    """Return the JSON output of a command."""
    result = run.invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    return document


@pytest.mark.parametrize("command", MANIFESTS_ONLY)
def test_listing_commands_read_only_manifests(command: str, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack is read and nothing is written, for a person or for a program."""
    opened: list[scenes.Counting] = []
    plain = StorePlace.open

    def counted(place: StorePlace, *, write: bool = False) -> Store:
        opened.append(scenes.Counting(plain(place, write=write)))
        return opened[-1]

    monkeypatch.setattr(StorePlace, "open", counted)
    for form in ([], ["--json"]):
        result = run.invoke(app, [command, history.url, *MANIFESTS_ONLY[command], *form])
        assert result.exit_code == 0, result.output
        assert opened[-1].reads
        assert opened[-1].packs == []


def test_ls_and_log_list_commits_newest_first(history: History) -> None:
    """With the names that point to them, and how many more there are than are shown."""
    listed = answer("ls", history.url)
    assert listed["generation"] == 3
    assert [row["checkpoint"] for row in listed["checkpoints"]] == history.names[::-1]
    assert [row["latest"] for row in listed["checkpoints"]] == [True, False, False, False]
    assert [row["bytes"] for row in listed["checkpoints"]] == [scenes.BYTES] * 4
    logged = answer("log", history.url, "-n", "2")
    assert [row["step"] for row in logged["commits"]] == [400, 300]
    assert logged["commits"][1]["parent"] == history.names[1], "its parent is read too, for the deltas"
    assert logged["more"] == 2


def test_listing_an_empty_store_is_no_error(tmp_path: Path) -> None:
    """Nothing was committed yet; a command that needs a checkpoint says so and exits with 1."""
    for command in ("ls", "log", "du"):
        assert run.invoke(app, [command, str(tmp_path)]).exit_code == 0
    result = run.invoke(app, ["show", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "nothing was ever committed" in result.stderr


def test_numbers_beyond_all_that_there_is_are_taken_or_refused(history: History, tmp_path: Path) -> None:
    """More commits than there are is all of them; no checkpoint can have a step that its name does not hold."""
    assert len(answer("log", history.url, "-n", str(1 << 64))["commits"]) == 4
    (tmp_path / "x.pt").write_bytes(b"")
    result = run.invoke(app, ["import", str(tmp_path / "new"), str(tmp_path / "x.pt"), "--step", str(1 << 63)])
    assert (result.exit_code, result.stdout, (tmp_path / "new").exists()) == (2, "", False)
    assert "--step" in result.stderr


def test_whoever_verifies_nothing_is_not_told_that_all_is_well(tmp_path: Path) -> None:
    """The address may be mistyped: a night's job that checks a store must not go on for months in peace."""
    shown = run.invoke(app, ["verify", str(tmp_path)])
    assert (shown.exit_code, "ok" in shown.stdout.split()) == (1, False)
    assert "there is nothing in it: is that the address?" in " ".join(shown.stdout.split())
    assert answer("verify", str(tmp_path), code=1) == answer("verify", str(tmp_path), code=1) | {"bytes": 0}


@pytest.mark.parametrize("words", [["gc"], ["repair"], ["tag", "best", "200"], ["pin", "200"], ["unpin", "200"]])
def test_a_store_that_is_not_there_is_not_made_by_a_command_about_it(words: list[str], tmp_path: Path) -> None:
    """Only an import makes one."""
    there = tmp_path / "mistyped"
    result = run.invoke(app, [words[0], str(there), *words[1:]])
    assert (result.exit_code, result.stdout, there.exists()) == (2, "", False)
    assert "there is no such directory" in result.stderr


def test_a_checkpoint_is_named_in_several_ways(history: History) -> None:
    """By latest, by its step, by its name or by a prefix of it."""
    for text in ("200", history.names[1], history.names[1][:12]):
        assert answer("show", history.url, text)["summary"]["checkpoint"] == history.names[1]
    assert answer("show", history.url)["summary"]["step"] == 400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "{}", "77"], "77"),
        (["show", "{}", "0000"], "0000"),
        (["diff", "{}", "100", "77"], "77"),
        (["diff", "{}", "", "100"], "before"),
        (["plan", "{}"], "--to"),
        (["plan", "{}", "--to", "pp=9"], "4"),
        (["plan", "{}", "--to", "xp=9"], "pp=2,dp=3,tp=2"),
        (["plan", "{}", "--to", "dp=3", "--slots", "2"], "--slots"),
        (["plan", "{}", "--to", "pp=2", "--blocks", "layers"], "blocks"),
        (["stats", "{}", "--match", "nowhere"], "nowhere"),
        (["tree", "{}", "--match", "nowhere*"], "nowhere"),
        (["diff", "{}", "100", "200", "--match", "model/nowhere*", "--quiet"], "--match 'model/nowhere*': none of"),
        (["cat", "{}", "model/head"], "model/head.weight"),
        (["cat", "{}", "model/head.weight", "--slice", "0:4,0,0"], "2 dims"),
        (["cat", "{}", "model/head.weight", "--slice", "64"], "outside"),
        (["cat", "{}", "model/head.weight", "--slice", "a:b"], "A:B"),
        (["cat", "{}", "model/head.weight", "--json", "--out", "/nowhere/x"], "--json prints numbers, and --out"),
        (["cat", "{}", "model/head.weight", "--json", "--as", "raw"], "--json prints numbers, and --as"),
        (["gc", "{}", "--grace", "10d"], "10d"),
        (["gc", "{}", "--keep-every", "10"], "--keep-last"),
        (["import", "{}", "/nowhere/x.pt"], "/nowhere"),
        (["export", "{}", "/nowhere/x"], "--to"),
        (["ls", "nonsense://x"], "nonsense"),
        (["ls", "/nowhere/at/all"], "/nowhere"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str], words: str, history: History) -> None:
    """It says what is wrong and what would be right on stderr.

    Exit code 2, or 1 where the checkpoint does not exist.
    """
    result = run.invoke(app, [argument.replace("{}", history.url) for argument in arguments])
    absent = "--match" not in arguments and arguments[0] in ("show", "diff")
    assert result.exit_code == 2 or (result.exit_code == 1 and absent), result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_for_every_command(command: str) -> None:
    """Each shows how to call it, fits a page, and lists --json."""
    result = run.invoke(app, [command, "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"elastic3d ckpt {command} " in result.stdout
    assert "--json" in result.stdout
    assert result.stdout.count("\n") < 66
    assert run.invoke(app, [command]).exit_code == 2


def test_diff_says_which_tensors_changed(history: History) -> None:
    """Against the previous commit by default; exactly with --values; --quiet reports by exit code only."""
    difference = answer("diff", history.url)["difference"]
    assert (difference["before"], difference["after"]) == (history.names[2], history.names[3])
    changes = {tensor["key"]: tensor["change"] for tensor in difference["tensors"]}
    assert changes["model/embed.weight"] == "same"
    assert changes["model/head.weight"] == "changed"
    exact = {one["key"]: one for one in answer("diff", history.url, "100", "200", "--values", "-m", "mlp")["values"]}
    assert set(exact) == {key for key in changes if "mlp" in key}
    assert exact["model/blocks.0.mlp.weight"]["max_abs"] == pytest.approx(0.0328, abs=1e-4)
    assert run.invoke(app, ["diff", history.url, "100", "200", "--quiet"]).exit_code == 1
    assert run.invoke(app, ["diff", history.url, "200", "200", "--quiet"]).exit_code == 0
    frozen = ["diff", history.url, "200", "300", "--match", "embed", "--quiet"]
    assert run.invoke(app, frozen).exit_code == 1, "recut: equality is unknown"
    assert run.invoke(app, [*frozen, "--values"]).exit_code == 0


def test_diff_compares_two_stores(history: History, tmp_path: Path) -> None:
    """Checkpoints with the same contents are equal wherever they are and whoever wrote them."""
    other = tmp_path / "other"
    scenes.save(scenes.open_store(str(other)), 200, scenes.MeshSizes(dp=1))
    result = run.invoke(app, ["diff", history.url, "200", "200", "--other", str(other), "--values", "--quiet"])
    assert result.exit_code == 0


def test_diff_compares_stores_with_keys_of_their_own(history: History, tmp_path: Path) -> None:
    """And one that is encrypted with one that is not; the environment may have a key, too."""
    pytest.importorskip("cryptography")
    from checkpointing.stores.keys import Key

    for name in ("one", "other"):
        key = Key.generate()
        (tmp_path / f"{name}.key").write_text(key.text())
        scenes.save(scenes.open_store(str(tmp_path / name), key=key), 200, scenes.MeshSizes(dp=1))

    def same(url: str, key: str, other: str, other_key: str) -> int:
        keys = ["--key-file", key, "--other-key-file", other_key]
        return run.invoke(app, ["diff", url, "200", "200", "--other", other, "--values", "--quiet", *keys]).exit_code

    one, other = (str(tmp_path / name) for name in ("one", "other"))
    assert same(one, f"{one}.key", other, f"{other}.key") == 0
    assert same(one, f"{one}.key", history.url, "none") == 0
    assert same(history.url, "none", other, f"{other}.key") == 0
    lonely = run.invoke(app, ["diff", one, "--key-file", f"{one}.key", "--other-key-file", f"{other}.key"])
    assert (lonely.exit_code, "--other names" in lonely.stderr) == (2, True)


def test_stats_filters_tensors_and_finds_nan(history: History) -> None:
    """--bad names the tensor with the NaN and exits with 1; the checkpoint before has none."""
    bad = answer("stats", history.url, "--bad", code=1)["tensors"]
    assert [(row["spec"]["key"], row["nans"], row["max"]) for row in bad] == [("model/head.weight", 1, "inf")]
    assert answer("stats", history.url, "300", "--bad")["tensors"] == []
    largest = answer("stats", history.url, "300", "--sort", "max", "-n", "2", "--dtype", "float32")["tensors"]
    assert [row["max"] for row in largest] == [300.0, 300.0]


def test_plan_says_what_each_rank_would_read(history: History) -> None:
    """With one reader per rank or per node. Together they need every byte, and scalars more than once."""
    ranks = answer("plan", history.url, "100", "--to", "pp=2,dp=2")
    assert [reader["places"][0] for reader in ranks["readers"]] == [
        {"pp": pp, "dp": dp, "tp": 0, "cp": 0} for pp in (0, 1) for dp in (0, 1)
    ]
    assert max(reader["over_read"] for reader in ranks["readers"]) < 1.01, "each rank reads its own tiles"
    assert sum(reader["needed"] for reader in ranks["readers"]) == scenes.BYTES + 14 * 4
    assert ranks["homes"]["last"] == ["head.weight", "norm.weight"]
    nodes = answer("plan", history.url, "100", "--to", "dp=4", "--slots", "2")["readers"]
    assert [node["ranks"] for node in nodes] == [[0, 1], [2, 3]]


def test_cat_prints_and_saves_tensors(history: History, tmp_path: Path) -> None:
    """As text, npy and raw bytes, whole or in part; dtypes that numpy lacks are widened."""
    state = {spec.key: data for spec, data in scenes.state(200).items()}
    values = np.frombuffer(state["model/head.weight"], "<f4").reshape(64, 16)
    printed = run.invoke(app, ["cat", history.url, "model/head.weight", "--of", "200", "--slice", "-1,:4"])
    assert np.array2string(values[-1, :4], max_line_width=120) in printed.stdout
    saved = tmp_path / "head.npy"
    part = ["cat", history.url, "model/head.weight", "--of", "200", "--slice", "5:9", "-o", str(saved)]
    assert run.invoke(app, part).exit_code == 0
    np.testing.assert_array_equal(np.load(saved), values[5:9])
    raw = run.invoke(app, ["cat", history.url, "model/embed.weight", "--as", "raw"])
    assert raw.stdout_bytes == state["model/embed.weight"]
    wide = run.invoke(app, ["cat", history.url, "model/embed.weight", "-o", str(tmp_path / "embed.npy")])
    assert "float32" in wide.stderr
    bits = np.load(tmp_path / "embed.npy").view("<u4") >> 16
    assert bits.astype("<u2").tobytes() == state["model/embed.weight"]
    assert answer("cat", history.url, "optimizer/norm.weight/step", "--of", "300")["values"] == 300.0
    assert answer("cat", history.url, "model/head.weight", "-s", "0,2:6")["values"][1] == "nan"


def test_cat_takes_slices_as_python_does(history: History) -> None:
    """Indices from the end, open ends and single rows, on each dim separately."""
    spec = open_checkpoint(history.store).specs["model/head.weight"]
    whole = np.arange(64 * 16).reshape(64, 16)
    for text in ("", ":", "3", "-64", "2:5,:", "-3:,4", ":-60,-1", "70:", "5:2", "0:64,0:16"):
        box, dropped = cut(spec, text)
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        expected = eval(f"whole[{text or ':'}]", {"whole": whole})
        shape = tuple(size for dim, size in enumerate(box.shape) if dim not in dropped)
        np.testing.assert_array_equal(whole[index].reshape(shape), expected)
    for text in ("64", "::2", "1:2:3", "x", ",1", "1,2,3"):
        with pytest.raises(UsageError, match="--slice"):
            cut(spec, text)


def test_verify_exits_with_1_on_a_wrong_byte(history: History, tmp_path: Path) -> None:
    """A healthy store is ok; a flipped byte is named by tensor and pack, with the checkpoints it affects."""
    store = tmp_path / "copy"
    shutil.copytree(history.url, store)
    assert run.invoke(app, ["verify", str(store)]).stdout.startswith("ok ")
    path = next(store.glob("packs/*/*.pack"))
    data = bytearray(path.read_bytes())
    data[9] ^= 4
    path.write_bytes(data)
    (finding,) = answer("verify", str(store), code=1)["findings"]
    assert finding["pack"] == path.stem
    assert finding["tensor"].split("/")[0] in ("model", "optimizer")
    assert finding["checkpoints"]
    shown = run.invoke(app, ["verify", str(store)])
    assert shown.exit_code == 1
    assert "corrupt" in shown.stdout


def test_a_damaged_checkpoint_does_not_hide_the_others(history: History, tmp_path: Path) -> None:
    """Lists name it, go on, and exit with 1."""
    store = tmp_path / "copy"
    shutil.copytree(history.url, store)
    record = store / "checkpoints" / f"{history.names[1]}.record"
    record.write_bytes(record.read_bytes()[:-1])
    listed = answer("ls", str(store), code=1)["checkpoints"]
    assert [bool(row["error"]) for row in listed] == [False, False, True, False]
    logged = answer("log", str(store), code=1)["commits"]
    assert [bool(row["error"]) for row in logged] == [False, False, True, False]
    assert logged[1]["changed"] is None, "its predecessor cannot be read"
    assert len(answer("du", str(store), code=1)["usage"]["checkpoints"]) == 3
    assert run.invoke(app, ["log", str(store)]).exit_code == 1


def test_the_shell_completes_checkpoints_and_tensors(history: History) -> None:
    """Names and steps of a local store; for any other store nothing, at once."""
    shell = {"_ROOT_COMPLETE": "complete_bash", "_TYPER_COMPLETE_ARGS": "", "COMP_WORDS": "", "COMP_CWORD": ""}

    def completed(*words: str) -> list[str]:
        line = ["ckpt", *words]
        names = {"COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1), "_CKPT_COMPLETE": "complete_bash"}
        result = run.invoke(app, [], prog_name="ckpt", env={**shell, **names})
        assert result.exit_code == 0, result.exception
        return result.stdout.split()

    assert completed("show", history.url, "2") == ["200"]
    assert completed("show", history.url, "lat") == ["latest"]
    assert history.names[0] in completed("diff", history.url, "0000")
    assert completed("cat", history.url, "model/he") == ["model/head.weight"]
    assert completed("show", "s3://bucket/gpt", "2") == []
    assert completed("show", "~nobody-here/gpt", "2") == []


def test_completion_can_be_installed() -> None:
    """For the whole command line, by typer."""
    shown = run.invoke(application(), ["--help"], env={"TERM": "dumb"})
    assert "--install-completion" in shown.stdout


def test_an_encrypted_store_needs_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file, or from where a run has it. Without one nothing is shown, and the reason is given in one line."""
    pytest.importorskip("cryptography")
    from checkpointing.stores.keys import Key

    key, url = Key.generate(), str(tmp_path / "run")
    scenes.save(open_store(url, key=key), 100, scenes.MeshSizes())
    (tmp_path / "key").write_text(key.text())
    (tmp_path / "key").chmod(0o600)
    assert answer("show", url, "--key-file", str(tmp_path / "key"))["summary"]["step"] == 100
    without = run.invoke(app, ["show", url])
    assert (without.exit_code in (1, 2), without.stdout, without.stderr.count("\n")) == (True, "", 1)
    monkeypatch.setenv("ELASTIC3D_STORE_KEY", key.text())
    assert answer("log", url)["commits"][0]["step"] == 100
