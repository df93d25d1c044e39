"""Faults of the etcd that a job uses: an etcd of our own, of one member, or of three where that is what it is about."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from random import Random
from typing import Self

from chaos.faults.fault import About, Ends, Fault, Need, OfNode, Place, Replay, check_seconds
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.machine.throttle import Throttle
from chaos.servers.etcd import EtcdCluster, EtcdMember
from chaos.servers.etcd_attacks import alarms, change_password, compact, fill, make_space, move_leader
from elastic3d.errors import UsageError

_AWAY, _ONE = "etcd is away for everybody", "one of three etcd members dies or stops"
_REFUSES = "etcd is full, or no longer accepts the password"
_TRAINS_ON = "training goes on in the same generation; none can change until it is back"
_SERVES = "the others serve, training goes on; without two of them as without etcd"
_AGAIN = 0.5  # seconds until what etcd did not take is tried again
_FULL = 2.0  # seconds for which an etcd is full that came back so
_RUNS = 0.02  # seconds for which a slow etcd runs before it stands still again


def _outage(
    enters: str,
    promised: str,
    row: str,
    *,
    detector: str = "",
    needs: frozenset[Need] = frozenset(),
    sure: bool = True,
) -> About:
    return About(
        place=Place.ETCD,
        enters=enters,
        promised=promised,
        row=row,
        detector=detector,
        needs=needs,
        replay=Replay.TIMED,
        ends=Ends.NOTHING,
        sure=sure,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lasting(Fault):
    """Something is wrong with etcd for `seconds`."""

    seconds: float = 5.0

    def check(self) -> None:
        """Refuse a time that is none."""
        check_seconds(self, self.seconds)

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one that is shorter or longer than a lease."""
        return cls(when=When(step=chance.randrange(1, steps)), seconds=chance.choice((0.5, 2.0, 5.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outage(_Lasting):
    """Members of etcd, as a rule all, are away for `seconds`."""

    def victims(self, etcd: EtcdCluster) -> list[EtcdMember]:
        """Return the members that are to be away."""
        return etcd.members


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdPause(_Outage):
    """SIGSTOP to etcd, and SIGCONT `seconds` later: leases have run out meanwhile."""

    WORD = "etcd-pause"
    ABOUT = _outage("SIGSTOP to its processes, then SIGCONT", _TRAINS_ON, _AWAY, detector="etcd.lost")

    def make(self, job: LiveJob) -> bool:
        """Stop it; not while it is away."""
        etcd = job.own_etcd
        if not etcd.serving:
            return False
        victims = self.victims(etcd)
        job.note("etcd paused")
        for member in victims:
            member.pause()

        def resume() -> None:
            # One whose data was replaced meanwhile is another process, which runs.
            for member in victims:
                if member.stopped:
                    member.resume()

        job.later(self.seconds, resume)
        return True

    def __str__(self) -> str:
        return f"pause etcd for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRestart(_Outage):
    """SIGKILL to etcd, which is started again on the same data `seconds` later."""

    WORD = "etcd-restart"
    ABOUT = _outage("SIGKILL to its processes, then new ones on their data", _TRAINS_ON, _AWAY, detector="etcd.lost")

    def make(self, job: LiveJob) -> bool:
        """Kill it; not while it is away."""
        etcd = job.own_etcd
        if not etcd.serving:
            return False
        victims = self.victims(etcd)
        job.note("etcd killed")
        for member in victims:
            member.kill()

        def restart() -> None:
            for member in victims:
                if not member.alive:
                    member.start()
            etcd.wait_healthy()

        job.later(self.seconds, restart)
        return True

    def __str__(self) -> str:
        return f"restart etcd after {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMemberPause(EtcdPause):
    """SIGSTOP to the leader of an etcd of three, with `members = 2` to another one as well, and SIGCONT later."""

    WORD = "etcd-member-pause"
    members: int = 1
    ABOUT = _outage("SIGSTOP to their processes, then SIGCONT", _SERVES, _ONE, needs=frozenset({Need.MEMBERS}))

    def victims(self, etcd: EtcdCluster) -> list[EtcdMember]:
        """Return the leader, and another one for two."""
        return _leader_first(etcd)[: self.members]

    def check(self) -> None:
        """Refuse numbers that make it another fault."""
        EtcdPause.check(self)
        _check_members(self, self.members)

    def __str__(self) -> str:
        return f"pause {self.members} of 3 etcd members for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMemberRestart(EtcdRestart):
    """SIGKILL to the leader of an etcd of three, with `members = 2` to another one as well, and new ones later."""

    WORD = "etcd-member-restart"
    members: int = 1
    ABOUT = _outage(
        "SIGKILL to their processes, then new ones on their data", _SERVES, _ONE, needs=frozenset({Need.MEMBERS})
    )

    def victims(self, etcd: EtcdCluster) -> list[EtcdMember]:
        """Return the leader, and another one for two."""
        return _leader_first(etcd)[: self.members]

    def check(self) -> None:
        """Refuse numbers that make it another fault."""
        EtcdRestart.check(self)
        _check_members(self, self.members)

    def __str__(self) -> str:
        return f"restart {self.members} of 3 etcd members after {self.seconds:g} s {self.when}"


def _leader_first(etcd: EtcdCluster) -> list[EtcdMember]:
    leader = etcd.leader()
    return [leader, *(member for member in etcd.members if member is not leader)]


def _check_members(fault: Fault, members: int) -> None:
    if members not in (1, 2):
        raise UsageError(f"{fault}: members must be 1, so that the others serve, or 2, so that none does")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdEmpty(Fault):
    """etcd comes back with no data at all."""

    WORD = "etcd-empty"
    ABOUT = About(
        place=Place.ETCD,
        enters="SIGKILL to its process, then a new one on an empty folder",
        promised="its members notice, write what they know of the job again, and train on",
        row="etcd comes back empty or from an older backup",
        detector="etcd.rolled_back",
        bar=30.0,
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Empty it; not while it is away."""
        server = job.own_server
        if not server.serving:
            return False
        job.note("etcd emptied")
        server.restore(None)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRestored(Fault):
    """etcd comes back from a backup that was taken `seconds` before."""

    WORD = "etcd-restored"
    LASTING = True
    seconds: float = 3.0
    ABOUT = About(
        place=Place.ETCD,
        enters="SIGKILL to its process, then a new one on a copy of its data",
        promised="its members notice, write what they know of the job again, and train on",
        row="etcd comes back empty or from an older backup",
        detector="etcd.rolled_back",
        bar=30.0,
        replay=Replay.TIMED,
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Take the backup; not while etcd is away. It happens when that is put back."""
        server = job.own_server
        if not server.serving:
            return False
        job.note("etcd backed up")
        backup = server.back_up()

        def restore() -> None:
            if not job.happens(self):
                return
            if server.expired:
                job.later(_AGAIN, restore)
                return
            job.note("etcd restored")
            server.restore(backup)
            if alarms(server):
                # The backup is one of when it was full.
                _make_space_after(job, _FULL)

        job.later(self.seconds, restore)
        return True

    def check(self) -> None:
        """Refuse a time that is none."""
        check_seconds(self, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdCompact(Fault):
    """etcd forgets all changes up to now."""

    WORD = "etcd-compact"
    ABOUT = About(
        place=Place.ETCD,
        enters="a compaction at its newest revision, as an operator orders it",
        promised="watches that fell behind read anew; nothing changes",
        page="guides/etcd.md",
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Compact it; not while it is away."""
        if not job.own_etcd.serving:
            return False
        job.note("etcd compacted")
        compact(job.own_etcd)
        return True


def _make_space_after(job: LiveJob, seconds: float) -> None:
    """Have etcd's operator make space after so many seconds, or once it serves."""

    def end() -> None:
        if job.own_etcd.serving:
            make_space(job.own_etcd)
        else:
            job.later(_AGAIN, end)

    job.later(seconds, end)


def _takes_writes(etcd: EtcdCluster) -> bool:
    """Return whether etcd serves and is not full: an operator's orders fail otherwise."""
    try:
        return etcd.serving and not alarms(etcd)
    except OSError:  # it has just come back
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdFull(_Lasting):
    """A neighbour fills etcd, which writes nothing any more; `seconds` later its operator makes space."""

    WORD = "etcd-full"
    ABOUT = _outage(
        "data of somebody else, up to a quota that is set low; then they are deleted, and the alarm is disarmed",
        _TRAINS_ON,
        _REFUSES,
        detector="etcd.impaired",
        needs=frozenset({Need.QUOTA}),
        sure=False,
    )

    def make(self, job: LiveJob) -> bool:
        """Fill it; not while it is away, or full already. There is space again once it serves."""
        etcd = job.own_etcd
        if not _takes_writes(etcd):
            return False
        job.note("etcd full")
        fill(etcd)
        _make_space_after(job, self.seconds)
        return True

    def __str__(self) -> str:
        return f"fill etcd for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdPassword(_Lasting):
    """The password of the job's user is changed, and the nodes' file has the new one `seconds` later."""

    WORD = "etcd-password"
    ABOUT = _outage(
        "the change of a user's password, as an operator orders it, and later the file that `password_file=` names",
        _TRAINS_ON,
        _REFUSES,
        detector="etcd.impaired",
        needs=frozenset({Need.PASSWORD}),
        sure=False,
    )

    def make(self, job: LiveJob) -> bool:
        """Change it; not while etcd is away or full."""
        etcd, password = job.own_etcd, secrets.token_hex(8)
        if not _takes_writes(etcd):
            return False
        job.note("etcd password changed")
        change_password(etcd, password)
        # Whichever is the newest by then: another change may have come in between.
        job.later(self.seconds, lambda: job.password_file.write_text(etcd.password or ""))
        return True

    def __str__(self) -> str:
        return f"change etcd's password for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdCertificate(_Lasting):
    """etcd's certificate is over when its members start anew; `seconds` later there are new ones, the nodes' too."""

    WORD = "etcd-certificate"
    ABOUT = _outage(
        "SIGKILL to its processes, then new ones on their data whose certificate is over; then other files",
        _TRAINS_ON,
        "etcd's certificate is over, or replaced",
        detector="etcd.lost",
        needs=frozenset({Need.CERTIFICATES}),
    )

    def make(self, job: LiveJob) -> bool:
        """Have it run out; not while etcd is away or full."""
        etcd = job.own_etcd
        if not _takes_writes(etcd):
            return False
        job.note("etcd certificate over")
        etcd.expire()

        def renew() -> None:
            job.note("etcd certificate renewed")
            etcd.renew()

        job.later(self.seconds, renew)
        return True

    def __str__(self) -> str:
        return f"let etcd's certificate be over for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSlow(_Lasting):
    """etcd answers only once in `answers` seconds, for `seconds`."""

    WORD = "etcd-slow"
    answers: float = 0.5
    ABOUT = _outage(
        "SIGSTOP and SIGCONT to its processes by turns, as a disk does that is slow to sync",
        "training goes on in the same generation; changes of it take longer",
        "etcd is slow",
    )

    def check(self) -> None:
        """Refuse times that are none, and one that is an outage."""
        _Lasting.check(self)
        if not 0.05 <= self.answers <= 1.0:
            raise UsageError(f"{self}: answers must be from 0.05 to 1 s; what is longer is an outage: etcd-pause")

    def make(self, job: LiveJob) -> bool:
        """Slow it down; not while it is away."""
        etcd = job.own_etcd
        if not etcd.serving:
            return False
        job.note("etcd slow")

        def running() -> list[int]:
            return [member.pid for member in etcd.members if member.alive and not member.stopped]

        throttle = Throttle(running, _RUNS / self.answers, period=self.answers)

        def end() -> None:
            throttle.close()
            job.note("etcd quick")

        job.later(self.seconds, end)
        return True

    def __str__(self) -> str:
        return f"slow etcd down to an answer in {self.answers:g} s for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMoveLeader(Fault):
    """The leader of an etcd of three hands over to another member."""

    WORD = "etcd-move-leader"
    ABOUT = About(
        place=Place.ETCD,
        enters="a transfer of leadership, as an operator orders it before maintenance",
        promised="leases and watches go on; nothing changes",
        page="guides/etcd.md",
        needs=frozenset({Need.MEMBERS}),
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Have it hand over; not while a member is away."""
        if not job.own_etcd.serving or not move_leader(job.own_etcd):
            return False
        job.note("etcd leader moved")
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdDeleted(Fault):
    """Somebody deletes all keys of the job by hand."""

    WORD = "etcd-deleted"
    ABOUT = About(
        place=Place.ETCD,
        enters="one deletion of all keys below the job's prefix",
        promised="members write their keys again, and the leader the generation, which it knows; nothing changes",
        page="guides/etcd.md",
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Delete them; not while etcd is away."""
        return job.own_etcd.serving and job.delete_keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke(OfNode):
    """Somebody ends the lease of a node that lives, by hand."""

    WORD = "revoke"
    ABOUT = About(
        place=Place.ETCD,
        enters="the revocation of the lease of its member key",
        promised="its heartbeats veto, and it registers again; no generation changes",
        row="a lease runs out though its node lives",
        ends=Ends.NOTHING,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Revoke it; not while etcd is away, or the node not registered."""
        return job.own_etcd.serving and job.revoke(name)


KINDS = (
    EtcdPause,
    EtcdRestart,
    EtcdMemberPause,
    EtcdMemberRestart,
    EtcdEmpty,
    EtcdRestored,
    EtcdCompact,
    EtcdFull,
    EtcdPassword,
    EtcdCertificate,
    EtcdSlow,
    EtcdMoveLeader,
    EtcdDeleted,
    Revoke,
)
OUTAGES = (EtcdPause, EtcdRestart, EtcdEmpty, EtcdRestored)
"""Those during which it is away; the ones of members are kinds of these."""
