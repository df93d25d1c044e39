"""What a state knows of the user's code, in real folders and repositories; and a folder compared with that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic3d.errors import UsageError
from elastic3d.provenance import code
from elastic3d.provenance.code import CodeState, ask_git
from elastic3d.provenance.comparing import CodeComparison, compare
from elastic3d.values import from_json

SCRIPT = """
import json, sys
import helper, package.part
sys.path.insert(0, "{other}")
import stranger
from elastic3d.provenance import code
from elastic3d.values import to_json
root, state = code.of_process()
import late
print(json.dumps([str(root), to_json(state), to_json(code.imported_since(root, state))]))
"""


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script with its modules in a folder below others, without a repository."""
    made = tmp_path / "work" / "code"
    (made / "package").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "stranger.py").write_text("")
    (made / "train.py").write_text(SCRIPT.format(other=tmp_path / "other"))
    for name in ("helper.py", "late.py", "unused.py", "package/__init__.py", "package/part.py"):
        (made / name).write_text(f"# {name}\n")
    return made


@pytest.fixture
def repository(folder: Path) -> Path:
    """The same below the root of a repository with one commit."""
    root = folder.parent
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    git(root, "remote", "add", "origin", "https://me:secret@host/x.git")
    return root


def ran(script: Path) -> tuple[Path, CodeState, CodeState]:
    """Run the script; return the folder it found, and its code before and after a late import."""
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "secret" not in done.stdout
    root, early, late = json.loads(done.stdout)
    return Path(root), from_json(CodeState, early), from_json(CodeState, late)


def test_a_script_outside_of_a_repository_says_so(folder: Path) -> None:
    """Its own folder is that of its files: those that it imported, with their digests."""
    root, early, late = ran(folder / "train.py")
    assert root == folder
    assert (early.script, early.revision, early.diff) == ("train.py", "", "")
    assert early.without == "the script is in no git repository"
    assert set(early.files) == {"train.py", "helper.py", "package/__init__.py", "package/part.py"}
    assert set(late.files) == {*early.files, "late.py"}
    assert early.elsewhere == late.elsewhere == ("stranger",)


def test_a_repository_gives_revision_and_changes(repository: Path) -> None:
    """Paths begin at its root. Changes to tracked files count whether or not they were imported."""
    script = repository / "code" / "train.py"
    root, clean, _ = ran(script)
    assert (root, clean.script, clean.without) == (repository, "code/train.py", "")
    assert (clean.revision, clean.diff) == (git(repository, "rev-parse", "HEAD"), "")
    (repository / "code" / "unused.py").write_text("changed")
    _, one, _ = ran(script)
    (repository / "code" / "unused.py").write_text("changed again")
    _, other, _ = ran(script)
    assert clean.revision == one.revision == other.revision
    assert len({clean.diff, one.diff, other.diff}) == 3
    assert "code/unused.py" in one.files
    assert "code/unused.py" not in clean.files


def test_users_settings_of_git_change_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a program run that they name."""
    (repository / "code" / "unused.py").write_text("changed")
    before = ask_git(repository)
    settings = repository.parent / "settings"
    settings.write_text(
        '[diff]\nnoprefix = true\nexternal = "touch ran"\n[color]\nui = always\n[core]\nquotePath = true'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    assert ask_git(repository) == before
    assert not (repository / "ran").exists()


def test_a_repository_without_a_commit_says_so(folder: Path) -> None:
    """Its root is still that of the paths."""
    git(folder.parent, "init", "-q")
    root, state, _ = ran(folder / "train.py")
    assert root == folder.parent
    assert (state.revision, state.without) == ("", "the repository has no commit")


def test_without_git_only_files_are_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it says so."""
    monkeypatch.setenv("PATH", str(folder))
    assert ask_git(folder).without == "git is not installed here"


def test_a_git_that_does_not_answer_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its time; one that fails has nothing of what it says kept."""
    slow = folder / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    begun = time.monotonic()
    assert "took longer than" in ask_git(folder, patience=0.2).without
    assert time.monotonic() - begun < 10
    slow.write_text("#!/bin/sh\necho fatal: bad secret >&2; exit 128\n")
    assert ask_git(folder).without == "git failed"


def test_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many more there were is said."""
    monkeypatch.setattr(code, "MOST_FILES", 2)
    state = CodeState(script="train.py", files={"a.py": "0", "train.py": "1"})
    for name in ("helper", "late"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
        sys.modules[name].__file__ = str(folder / f"{name}.py")
    late = code.imported_since(folder, state)
    assert (len(late.files), late.left_out) == (2, 2)


def test_modules_whose_file_is_no_path_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some of torch's: they would seem to be files of the folder that a job is started in, and gone."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "made_up", type(sys)("made_up"))
    sys.modules["made_up"].__file__ = "_made_up.py"
    state = code.imported_since(folder, CodeState(script="train.py"))
    assert not state.files
    assert "made_up" not in state.elsewhere


def test_what_is_no_file_has_a_word_instead(folder: Path) -> None:
    """Nothing is raised for it."""
    (folder / "link").symlink_to("elsewhere")
    assert code.file_digest(folder / "nothing") == "gone"
    assert code.file_digest(folder) == "a folder"
    assert code.file_digest(folder / "link").startswith("link ")


def differing(compared: CodeComparison) -> list[str]:
    return [one.what for one in compared.differences]


def test_a_folder_with_the_same_code_is_the_same(repository: Path, tmp_path: Path) -> None:
    """In the repository, in a clone of it, and without git as far as files go."""
    _, _, state = ran(repository / "code" / "train.py")
    assert compare(state, repository).differences == ()
    git(tmp_path, "clone", "-q", str(repository), "clone")
    assert compare(state, tmp_path / "clone").differences == ()
    shutil.copytree(repository, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    copied = compare(state, tmp_path / "copy")
    assert (copied.differences, copied.without) == ((), "the script is in no git repository")


def test_what_differs_is_named(repository: Path) -> None:
    """Files that were changed, removed, or changed without having been imported; and a newer revision."""
    _, _, state = ran(repository / "code" / "train.py")
    (repository / "code" / "helper.py").write_text("other")
    (repository / "code" / "late.py").unlink()
    (repository / "code" / "unused.py").write_text("other")
    changed = compare(state, repository)
    assert differing(changed) == ["changes", "code/helper.py", "code/late.py", "code/unused.py"]
    assert [one.here for one in changed.differences if one.what == "code/late.py"] == ["gone"]
    git(repository, "commit", "-q", "-a", "-m", "two")
    assert differing(compare(state, repository)) == ["revision", "code/helper.py", "code/late.py"]


def test_files_that_a_state_does_not_keep_are_no_difference(repository: Path) -> None:
    """The digest of all changes is that of those, too; where it differs, it is not known which of them do."""
    (repository / "code" / "unused.py").write_text("other")
    _, _, state = ran(repository / "code" / "train.py")
    kept = {name: digest for name, digest in state.files.items() if name != "code/unused.py"}
    bounded = replace(state, files=kept, left_out=1)
    assert compare(bounded, repository).differences == ()
    (repository / "code" / "helper.py").write_text("other")
    changed = compare(bounded, repository)
    assert [(one.what, one.saved) for one in changed.differences if one.what.endswith("unused.py")] == [
        ("code/unused.py", "not kept")
    ]


def test_another_folder_is_refused(repository: Path, tmp_path: Path) -> None:
    """With what to give instead; a checkpoint's own words lead out of no folder."""
    _, _, state = ran(repository / "code" / "train.py")
    with pytest.raises(UsageError, match=r"it has no code/train.py, .* give the folder that this path begins in"):
        compare(state, repository / "code")
    with pytest.raises(UsageError, match="there is no such folder"):
        compare(state, tmp_path / "nothing")
    with pytest.raises(UsageError, match="names no code to compare with: the process has no script"):
        compare(CodeState(without="the process has no script"), repository)
    wrong: Any
    for wrong in ("/etc/passwd", "../x.py"):
        with pytest.raises(UsageError, match="in no folder of code"):
            compare(CodeState(script="code/train.py", files={wrong: "0"}), repository)
