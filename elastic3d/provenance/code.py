"""The user's code, as a state names it: git's revision, the digest of changes to that, and files with their digests.

The folder is that of the repository the script is in, or the script's own outside of one. Files are those that the
process has imported from there, and those that git tracks and that differ from the revision.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from elastic3d.clock import SYSTEM, Clock
from elastic3d.provenance.packages import installed, of_python

PATIENCE = 2.0
"""Seconds that git may take, and reading the files that it names."""
MOST_FILES = 256
MOST_ELSEWHERE = 16
LARGEST_FILE = 16 << 20
"""Bytes of a file that is read; a larger one counts by its size."""

_OWN = ("elastic3d", "checkpointing", "chaos")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeState:
    """The code in a folder."""

    script: str = ""
    """Path of the script in the folder, "" where nothing is known."""
    revision: str = ""
    """Git's, "" for none."""
    diff: str = ""
    """Digest of the tracked files that differ from the revision, by name and contents; "" where none does."""
    without: str = ""
    """Why there is no revision or no digest, in words; "" where there is."""
    files: dict[str, str] = field(default_factory=dict)
    """Digests of files by their path in the folder: those that were imported, and tracked ones that have changed."""
    left_out: int = 0
    """How many more there were than are kept."""
    elsewhere: tuple[str, ...] = ()
    """Modules that were imported from neither the folder nor a distribution."""


def script() -> Path | None:
    """Return the file that this process runs as its script, None for none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if path is None else Path(os.path.realpath(path))


def of_process(*, clock: Clock = SYSTEM) -> tuple[Path | None, CodeState]:
    """Return the folder of this process's script and the code in it, as it is now; None where there is no script."""
    path = script()
    if path is None:
        return None, CodeState(without="the process has no script")
    git = ask_git(path.parent, clock=clock)
    root = git.root or path.parent
    return root, imported_since(
        root,
        CodeState(
            script=_relative(path, root) or path.name,
            revision=git.revision,
            diff=git.diff,
            without=git.without,
            files=_bounded({**_digests(root, [path]), **git.changed}),
            left_out=max(0, len(git.changed) + 1 - MOST_FILES),
        ),
    )


def imported_since(root: Path, before: CodeState, seen: Collection[str] = ()) -> CodeState:
    """Return a state with the files that were imported from its folder and are not in it yet.

    seen: modules that need not be looked at again: there are thousands, and a trainer that begins is waited for.
    """
    paths, others = _imported(root, seen)
    new = [path for path in paths if _relative(path, root) not in before.files]
    elsewhere = tuple(sorted({*before.elsewhere, *others})[:MOST_ELSEWHERE])
    if not new and elsewhere == before.elsewhere:
        return before
    files = {**before.files, **_digests(root, new[:MOST_FILES])}
    return CodeState(
        script=before.script,
        revision=before.revision,
        diff=before.diff,
        without=before.without,
        files=_bounded(files),
        left_out=max(before.left_out, len(before.files) + len(new) - MOST_FILES, 0),
        elsewhere=elsewhere,
    )


def imported_files() -> dict[str, str]:
    """Return the digests of the files that this process has imported from its script's folder, by name.

    They are named from there, so that the folder may be somewhere else on each machine, and git is not asked.
    """
    path = script()
    if path is None:
        return {}
    paths, _ = _imported(path.parent, ())
    return dict(sorted(_digests(path.parent, paths).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """What git says of a folder. root: of the repository, None for none. changed: tracked files, with digests.

    The other fields are those of `CodeState`.
    """

    root: Path | None = None
    revision: str = ""
    diff: str = ""
    without: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)


def ask_git(folder: Path, *, patience: float = PATIENCE, clock: Clock = SYSTEM) -> Git:
    """Ask git about the repository that a folder is in, for at most `patience` seconds. It never raises."""
    if shutil.which("git") is None:
        return Git(without="git is not installed here")
    ends = clock.monotonic() + patience
    root: Path | None = None
    revision = ""
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel", patience=patience))
        revision = _git(folder, "rev-parse", "--verify", "HEAD", patience=ends - clock.monotonic())
        names = _git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD", "--", patience=ends - clock.monotonic())
        changed: dict[str, str] = {}
        for name in sorted(filter(None, names.split("\0"))):
            changed[name] = file_digest(root / name)
            if clock.monotonic() > ends:
                raise subprocess.TimeoutExpired("git diff", patience)
    except subprocess.TimeoutExpired:
        said = f"git, or the files that have changed, took longer than {patience:.0f} s"
        return Git(root=root, revision=revision, without=said)
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError) as error:
        return Git(root=root, revision=revision, without=_refusal(error, folder=root is None))
    whole = blake3(
        "".join(f"{name}\0{digest}\n" for name, digest in changed.items()).encode("utf-8", "surrogateescape")
    )
    return Git(root=root, revision=revision, diff=whole.hexdigest()[:32] if changed else "", changed=changed)


def _git(folder: Path, *arguments: str, patience: float) -> str:
    done = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=max(patience, 0.01),
        check=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
    )
    return os.fsdecode(done.stdout).rstrip("\n")


def _refusal(error: Exception, *, folder: bool) -> str:
    said = os.fsdecode(error.stderr) if isinstance(error, subprocess.CalledProcessError) else str(error)
    if "not a git repository" in said:
        return "the script is in no git repository"
    if "dubious ownership" in said:
        return "git does not trust the repository, which is another user's (safe.directory)"
    if not folder and "Needed a single revision" in said:
        return "the repository has no commit"
    return "git failed"  # nothing of what it says is kept: it may name folders, or addresses


def file_digest(path: Path) -> str:
    """Return the digest of a file's contents; what it is instead, where it is no file that can be read."""
    try:
        if path.is_symlink():
            return f"link {blake3(os.fsencode(os.readlink(path))).hexdigest()[:32]}"
        if path.is_dir():
            return "a folder"
        if (size := path.stat().st_size) > LARGEST_FILE:
            return f"{size} bytes"
        return blake3(path.read_bytes()).hexdigest()[:32]
    except FileNotFoundError:
        return "gone"
    except OSError:
        return "unreadable"


def _imported(root: Path, seen: Collection[str]) -> tuple[list[Path], set[str]]:
    """Return the files of modules that were imported from a folder, and modules from elsewhere."""
    paths, elsewhere = set[Path](), set[str]()
    for name in sys.modules.keys() - seen:
        module = sys.modules.get(name)
        file, top = getattr(module, "__file__", None), name.partition(".")[0]
        if not isinstance(file, str) or not os.path.isabs(file):
            continue  # some modules of torch have names of no file
        if top in _OWN or of_python(top, file) or installed(file):
            continue
        path = Path(os.path.realpath(file))
        if _relative(path, root):
            paths.add(path)
        elif top not in ("__main__", "__mp_main__"):
            elsewhere.add(top)
    return sorted(paths), elsewhere


def _digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    named = ((_relative(path, root), path) for path in paths)
    return {name: file_digest(path) for name, path in named if name}


def _bounded(files: Mapping[str, str]) -> dict[str, str]:
    kept = sorted(files.items())[:MOST_FILES]
    return {name.encode("utf-8", "replace").decode(): digest for name, digest in kept}


def _relative(path: Path, root: Path) -> str:
    """Return a path in a folder, "" for one outside of it."""
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return ""
