"""The errors of checkpointing, as a tree.

Every error says what happened, whether trying again helps, and what the person should do.

    CheckpointError
      StoreError            the store did not do what was asked
        StoreNotFound       the object is not there; trying again does not help
        StoreUnfit          the place cannot hold checkpoints at all (URL, permissions, conditional writes)
      FormatError           an object is not what format.md says; trying again does not help
        NewerFormat         a newer version wrote it; upgrade
        Corrupt             bytes do not have the digest they were written with
        ForeignFormat       another tool's file is not what that tool writes, or holds what cannot be kept here
      CommitRefused         a commit did not happen, and must not
        Fenced              a newer generation owns `latest`: stop committing
        Superseded          `latest` already holds a newer save of this history
        Incomplete          the rank manifests do not cover every tensor; other ranks may still be saving
        Inconsistent        ranks disagree about what they saved
      RestoreError          state that was asked for cannot be given
        NoCheckpoint        nothing was ever committed here
        MissingTile         no source has a good copy of a region
        SpecMismatch        tensors have another shape or dtype than those saved
        Unloadable          an object was saved as a pickle that is not plain data
        NotExportable       another tool's format cannot hold these tensors
      SourceError           one source of tiles could not deliver; another one may
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of every error checkpointing raises on purpose."""

    exit_code = 1


class StoreError(CheckpointError):
    """The store did not do what was asked; whether a write happened may be unknown. Trying again may help."""


class StoreNotFound(StoreError):
    """The object is not in the store; trying again does not help."""


class StoreUnfit(StoreError, ValueError):
    """The place cannot hold checkpoints; the message says what to change. Trying again does not help."""

    exit_code = 2


class FormatError(CheckpointError):
    """An object is not what format.md says; trying again does not help, another checkpoint may."""


class NewerFormat(FormatError):
    """A newer version wrote the object; upgrade to read it."""


class Corrupt(FormatError):
    """Bytes do not have the digest they were written with; restore from elsewhere."""


class ForeignFormat(FormatError):
    """Another tool's file is not what that tool writes, or holds what cannot be kept here; nothing was imported."""


class CommitRefused(CheckpointError):
    """A commit did not happen, and must not: training goes on, nothing was changed."""


class Fenced(CommitRefused):
    """A newer generation owns the ref; this leader is no longer one. Trying again does not help."""


class Superseded(CommitRefused):
    """The ref already holds this save's successor; there is nothing left to do."""


class Incomplete(CommitRefused):
    """The rank manifests do not cover every tensor; trying again helps when ranks are still saving."""


class Inconsistent(CommitRefused):
    """Ranks disagree about what they saved; trying again needs a new attempt with other contents."""


class RestoreError(CheckpointError):
    """State that was asked for cannot be given."""


class NoCheckpoint(RestoreError):
    """Nothing was ever committed in this store."""


class MissingTile(RestoreError):
    """No source has a good copy of a region of a tensor."""


class SpecMismatch(RestoreError, ValueError):
    """Tensors are wanted with another shape or dtype than they were saved with; values are never cast."""


class Unloadable(RestoreError):
    """An object was saved as a pickle that is not plain data; it is loaded once its classes are allowed."""


class NotExportable(RestoreError, ValueError):
    """Another tool's format cannot hold these tensors, or the target is taken; nothing was written."""

    exit_code = 2


class SourceError(CheckpointError):
    """One source of tiles could not deliver; another one may."""
