"""Code in a folder, compared with that which made a state: what differs is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import UsageError
from elastic3d.provenance.code import CodeState, ask_git, file_digest

LONG_PATIENCE = 60.0
"""Seconds that git may take where a person waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDifference:
    """One thing that differs: a file by its path, git's revision, or the changes to that."""

    what: str
    """`revision`, `changes`, or the path of a file in the folder."""
    saved: str
    """What it was: a revision or digest; `unchanged` for a file that was as in the revision, or `not kept`."""
    here: str
    """What it is in the folder; `gone` for a file that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeComparison:
    """A folder of code, compared."""

    folder: str
    """As it was given."""
    files: int
    """How many were compared."""
    left_out: int
    """How many of the state's files could not be, as it does not keep their digests."""
    without: str
    """Why revisions could not be compared, "" where they were."""
    differences: tuple[CodeDifference, ...]
    """What differs; () for nothing."""


def compare(saved: CodeState, folder: Path, *, clock: Clock = SYSTEM) -> CodeComparison:
    """Return how the code in a folder differs; UsageError if it cannot be what the state's files were in."""
    if not folder.is_dir():
        raise UsageError(
            f"--code {str(folder)!r}: there is no such folder; give the root of the repository, or the script's folder"
        )
    if not saved.script:
        raise UsageError(f"the checkpoint names no code to compare with: {saved.without or 'it has no script'}")
    if not _inside(folder, saved.script).exists():
        raise UsageError(
            f"--code {str(folder)!r}: it has no {saved.script}, which was the script: give the folder that this path "
            "begins in, which is the repository's, or the script's own outside of one"
        )
    here = {name: file_digest(_inside(folder, name)) for name in saved.files}
    differences = [
        CodeDifference(what=name, saved=digest, here=here[name])
        for name, digest in sorted(saved.files.items())
        if here[name] != digest
    ]
    git = ask_git(folder, patience=LONG_PATIENCE, clock=clock)
    without = saved.without or git.without
    if not without and git.root is not None and git.root != folder.resolve():
        without = f"the folder is not that of a repository, but in {git.root}"
    if not without:
        if git.revision != saved.revision:
            differences.insert(0, CodeDifference(what="revision", saved=saved.revision, here=git.revision))
        elif git.diff != saved.diff:
            differences += [
                CodeDifference(what=name, saved="not kept" if saved.left_out else "unchanged", here=digest)
                for name, digest in sorted(git.changed.items())
                if name not in saved.files
            ]
            differences.insert(0, CodeDifference(what="changes", saved=saved.diff or "none", here=git.diff or "none"))
    return CodeComparison(
        folder=str(folder),
        files=len(here),
        left_out=saved.left_out,
        without=without,
        differences=tuple(differences),
    )


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file that a checkpoint names; UsageError for one outside of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(f"the checkpoint names the file {name!r}, which is in no folder of code")
    return folder / path
