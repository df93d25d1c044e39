"""The errors of checkpointing, as a tree.

Every error says what happened, whether trying again helps, and what the person should do.

    CheckpointError
      StoreError            the store did not do what was asked
        StoreNotFound       the object is not there; trying again does not help
        StoreDenied         credentials are missing, wrong, expired, or may not do this
        StoreUnreachable    nobody answered at its address
        StoreFull           there is no room; free some, or give another place
        Miswritten          the store holds other bytes than were sent; trying again writes them again
        StoreUnfit          the place cannot hold checkpoints at all (URL, permissions, conditional writes)
          WrongKey          objects are encrypted with another key than was given, or with none
        Tampered            an encrypted object is not as it was sealed (it is Corrupt, too)
      FormatError           an object is not what format.md says; trying again does not help
        NewerFormat         a newer version wrote it; upgrade
        Corrupt             bytes do not have the digest they were written with
        ForeignFormat       another tool's file is not what that tool writes, or holds what cannot be kept here
      CommitRefused         a commit did not happen, and must not
        Fenced              a newer generation owns `latest`: stop committing
        Superseded          `latest` already holds a newer save of this history
        Incomplete          the rank manifests do not cover every tensor; other ranks may still be saving
        Inconsistent        ranks disagree about what they saved
        Collecting          a sweep will delete what the save needs; save again
      KeepRefused           a tag, pin or collection did not happen; nothing was changed
      RestoreError          state that was asked for cannot be given
        NoCheckpoint        nothing was ever committed here
        MissingTile         no source has a good copy of a region
        SpecMismatch        tensors have another shape or dtype than those saved
        Unloadable          an object was saved as a pickle that is not plain data
        NotExportable       another tool's format cannot hold these tensors
      SourceError           one source of tiles could not deliver; another one may
        TileLost            it lacks a good copy of one tile; that says nothing about its others
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of every error that checkpointing raises on purpose."""

    exit_code = 1


class StoreError(CheckpointError):
    """The store did not do what was asked; whether a write happened may be unknown. Trying again may help.

    transient: whether the same call may succeed in a moment without anybody's help.
    """

    transient = True


class StoreNotFound(StoreError):
    """The object is not in the store; trying again does not help."""

    transient = False


class StoreDenied(StoreError):
    """Credentials are missing, wrong, expired, or do not allow this; trying again helps once that has changed.

    So does S3 where this machine's clock is more than 15 minutes off: what is signed has a time.
    """

    transient = False


SKEWED = "RequestTimeTooSkewed"
"""The code of that answer, of Amazon S3's list of error codes."""

SET_THE_CLOCK = "this machine's clock and the store's are too far apart. Set the clock, for instance by chrony or ntp."


class StoreUnreachable(StoreError):
    """Nobody answered at the store's address: the network or the server is away, or the address is wrong.

    Trying again helps in the first two cases.
    """


class StoreFull(StoreError):
    """There is no room left; trying again helps once there is."""

    transient = False


class Miswritten(StoreError):
    """The store holds other bytes than were sent: they changed on the way. Trying again writes them again."""


class StoreUnfit(StoreError, ValueError):
    """The place cannot hold checkpoints; the message says what to change. Trying again does not help."""

    transient = False
    exit_code = 2


class WrongKey(StoreUnfit):
    """Objects are encrypted with another key than was given, or not at all; give the key they were written with."""


class FormatError(CheckpointError):
    """An object is not what format.md says; trying again does not help, another checkpoint may."""


class NewerFormat(FormatError):
    """A newer version wrote the object; upgrade to read it."""


class Corrupt(FormatError):
    """Bytes do not have the digest they were written with; restore from elsewhere."""


class ForeignFormat(FormatError):
    """Another tool's file is not what that tool writes, or holds what cannot be kept here; nothing was imported."""


class Tampered(Corrupt, StoreError):
    """An encrypted object is not as it was sealed under its name; restore from elsewhere.

    token: of the object, where it was read to be replaced.
    """

    transient = False
    token: str | None = None


class CommitRefused(CheckpointError):
    """A commit did not happen, and must not: training goes on, nothing was changed."""


class Fenced(CommitRefused):
    """A newer generation owns the ref: this leader has been replaced. Trying again does not help."""


class Superseded(CommitRefused):
    """The ref already holds this save's successor; there is nothing left to do."""


class Incomplete(CommitRefused):
    """The rank manifests do not cover every tensor; trying again helps when ranks are still saving."""


class Inconsistent(CommitRefused):
    """Ranks disagree about what they saved; trying again needs a new attempt with other contents."""


class Collecting(CommitRefused):
    """A sweep has condemned objects the save needs; save again, or try again when the sweep is over."""


class KeepRefused(CheckpointError):
    """A tag, pin, collection or repair did not happen, and nothing was changed; the message says what to do."""


class RestoreError(CheckpointError):
    """State that was asked for cannot be given."""


class NoCheckpoint(RestoreError):
    """Nothing was ever committed in this store."""


class MissingTile(RestoreError):
    """No source has a good copy of a region of a tensor.

    damaged: every copy on offer was read and found bad, so that trying again does not help; otherwise a copy could not
    be reached. key: of the tensor.
    """

    def __init__(self, message: str, *, damaged: bool = False, key: str = "") -> None:
        super().__init__(message)
        self.damaged, self.key = damaged, key


class SpecMismatch(RestoreError, ValueError):
    """Tensors are wanted with another shape or dtype than they were saved with; values are never cast."""


class Unloadable(RestoreError):
    """An object was saved as a pickle that is not plain data; it is loaded once its classes are allowed."""


class NotExportable(RestoreError, ValueError):
    """Another tool's format cannot hold these tensors, or the target cannot be written; nothing is left of it."""

    exit_code = 2


class SourceError(CheckpointError):
    """One source of tiles could not deliver; another one may."""


class TileLost(SourceError):
    """A source has no good copy of one tile; that says nothing about its others."""
