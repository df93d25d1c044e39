"""The errors of elastic3d, as a tree.

Every error says what happened, whether trying again helps, and what the person should do.

    Elastic3dError
      UsageError            the call or the command line is wrong; trying again does not help (exit 2)
        ModelError          the model cannot be taken as it is
        LayoutError         no layout fits the nodes, or the one asked for cannot be used
        ConfigurationError  rendezvous, etcd or store settings contradict each other or the job that runs
          NewerSchema       a record in etcd was written by a newer elastic3d
          BaseUnknown       a record in etcd holds changes against one that its reader does not have
      UnsupportedTorch      the installed torch is not one that elastic3d works with; the message says what to install
      EtcdError             etcd did not do what was asked
        EtcdUnavailable     no endpoint answered in time; trying again may help
          OutcomeUnknown    a write got no answer and may or may not be applied
          Impaired          etcd takes no writes, or does not know us any more; mend what the message names
          EtcdAway          the same as EtcdUnavailable, for torchrun
        EtcdRefused         wrong version, wrong credentials, or a request etcd will never accept
          PasswordRefused   etcd knows no such user with this password
          EtcdRefusedUs     the same, for torchrun
        LeaseGone           the lease is over, its keys with it; a new one is needed
        Compacted           the revision asked for was compacted away
        FutureRevision      the revision asked for was never reached: etcd was restored from a backup
      MembershipError       the job cannot be joined or cannot go on
        JobEnded            the job under this run id is over; the message says why
          RendezvousEnded   the same, for torchrun
        AdmissionFailed     this node did not pass its own checks; mend what the message names
        JobUnknown          there is no job under this run id; the message names the jobs there are (exit 3)
      NotFinite             loss or gradient is not finite, and the run was to stop for it; the message says what of
      StateError            state that was asked for is nowhere, or does not fit the model
        NothingLeft         none of the checkpoints that may be taken is whole
        StateUnfit          it does not fit the script; trying again does not help
        StoreAway           the store did not answer while a checkpoint was evaluated; it is tried again
      UnmatchedCollective   some ranks made a collective call, and others had ended
      CollectiveFailed      a collective of a script that was started by hand failed
      CalibrationFailed     something could not be measured; trying again helps where the machine was only busy
      TrainingFailed        the user's code raised on every try
      TrackerError          a tracker does not take points; it is tried again, and the message says what to mend

Some are defined beside the code that raises them; tests/test_errors.py holds that none is missing here.
"""

from __future__ import annotations


class Elastic3dError(Exception):
    """Base of every error elastic3d raises on purpose."""

    exit_code = 1
    final = False
    """Whether the same code on the same input is bound to raise it again: then it is not tried again."""


class UsageError(Elastic3dError, ValueError):
    """The call or the command line is wrong; trying again does not help."""

    exit_code = 2
    final = True


class ModelError(UsageError):
    """The model cannot be taken as it is: the message names the part and what would work."""


class LayoutError(UsageError):
    """No layout fits, or the requested one cannot be used."""


class ConfigurationError(UsageError):
    """Settings contradict each other or the job already running under this id."""


class EtcdError(Elastic3dError):
    """etcd did not do what was asked."""


class EtcdUnavailable(EtcdError):
    """No endpoint answered in time; trying again may help."""


class EtcdRefused(EtcdError):
    """Wrong version, wrong credentials, or a request etcd will never accept; trying again does not help."""


class MembershipError(Elastic3dError):
    """The job cannot be joined, or cannot go on."""


class JobEnded(MembershipError):
    """The job under this run id is over, for this node or for all; the message says why."""


class AdmissionFailed(MembershipError):
    """This node did not pass its own checks and never joined; the message names what to mend."""


class JobUnknown(MembershipError):
    """There is no job under this run id, or none at all; the message names the jobs there are."""

    exit_code = 3


class StateError(Elastic3dError):
    """State that was asked for is nowhere, or does not fit the model."""


class NothingLeft(StateError):
    """Of the checkpoints that may be taken none is whole; not that a store is away."""


class StateUnfit(StateError):
    """State and script do not go together: one of them has to be changed; trying again does not help."""

    final = True


class NotFinite(Elastic3dError):
    """Loss or gradient is not finite, and the run was to stop for it; trying again does not help."""

    final = True


class UnmatchedCollective(Elastic3dError):
    """Some ranks made a collective call when `main` had returned on others; make it on every rank."""


class TrackerError(Elastic3dError):
    """A tracker does not take points. Training goes on, and it is tried again; the message says what to mend."""


class CollectiveFailed(Elastic3dError):
    """A collective that a script made itself failed, outside any job of elastic3d; the message is the backend's."""


class CalibrationFailed(Elastic3dError):
    """Something could not be measured in its time; trying again helps where the machine was only busy."""


class TrainingFailed(Elastic3dError):
    """The user's code raised on every try; the message carries its own traceback."""
