"""Each write of the membership as one etcd transaction: conditions, operations, and what its success means to the core.

Pure, so that simulations send exactly what real members send. Every write here may be applied twice without harm, or is
fenced so that it cannot be: a leader's writes are conditional on the revision of its own key (etcd's locks are not
sound; a revision compared in the same transaction is), a member's writes on the absence of its tomb.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic3d import etcd_keys as keys
from elastic3d.etcd import Compare, Delete, Operation, Put
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.records import END_LASTS, Claim, LastEnd, Proposal, Pulse, encode, encode_change
from elastic3d.membership.stalls import Verdict
from elastic3d.values import Generation, Node

HISTORY = 200
"""Generations whose history is kept, and what was found about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brevity:
    """When only a generation's changes are written to the board, and the whole to a key that nobody watches.

    beyond: bytes up to which the whole record is on the board, where people can read it too: changes would gain
    nothing. share: most of the whole record's bytes that the changes may have; both go in one request, of which etcd
    takes 1.5 MiB.
    """

    beyond: int = 16 * 1024
    share: float = 0.5


BREVITY = Brevity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """One transaction. All operations run if all conditions hold, else none."""

    conditions: tuple[Compare, ...]
    operations: tuple[Operation, ...]


def lease_of(action: acts.Write, own: float) -> float | None:
    """Return the TTL in seconds of the lease the write needs: `own` for the member's own, None for none.

    A quarantine, the record of a flap and that of the newest end have their own leases, which nobody keeps alive.
    """
    match action:
        case acts.PutMember() | acts.PutReport() | acts.PutStall() | acts.Campaign() | acts.PutDoubt():
            return own
        case acts.PutQuarantine():
            return action.quarantine.seconds
        case acts.PutFlap():
            return action.seconds
        case acts.PutEnd():
            return END_LASTS
        case _:
            return None


def own_lease(action: acts.Write) -> bool:
    """Return whether the write is made under the member's own lease."""
    return isinstance(action, acts.PutMember | acts.PutReport | acts.PutStall | acts.Campaign | acts.PutDoubt)


def transaction(root: str, me: Node, action: acts.Write, lease: int = 0, *, brevity: Brevity = BREVITY) -> Transaction:
    """Return what to send to etcd for `action` of member `me`; `lease` is the one `lease_of` asks for."""
    leader, record, proposal = root + keys.LEADER, root + keys.GENERATION, root + keys.PROPOSAL
    withdrawn = Delete(proposal), Delete(keys.whole(proposal))

    def leads(token: int) -> tuple[Compare, ...]:
        return (Compare.mod_revision(leader, token),)

    match action:
        case acts.PutMember():
            key = root + keys.member(me.id)
            return _made(_not_buried(root, me), Put(key, encode(action.record), lease))
        case acts.PutReport():
            key = root + keys.report(me.id)
            return _made(_not_buried(root, me), Put(key, encode(action.report), lease))
        case acts.PutStall():
            key = root + keys.stall(me.id)
            return _made(_not_buried(root, me), Put(key, encode(action.stall), lease))
        case acts.DropStall():
            return _made((), Delete(root + keys.stall(me.id)))
        case acts.Bury():
            # The first reason to be out stands: a port that refuses after a clean leave does not make it a death.
            absent = (root + keys.tomb(action.id), *((root + keys.member(action.id),) * action.missing))
            return _made(
                tuple(map(Compare.absent, absent)),
                Delete(root + keys.member(action.id)),
                Delete(root + keys.report(action.id)),
                Delete(root + keys.stall(action.id)),
                Delete(root + keys.pulse(action.id)),
                Put(root + keys.tomb(action.id), encode(action.tomb)),
            )
        case acts.PutDoubt():
            return _made((), Put(root + keys.doubt(action.id), encode(action.doubt), lease))
        case acts.PutSecret():
            key = root + keys.SECRET
            return _made((Compare.mod_revision(key, action.revision),), Put(key, action.secret.encode()))
        case acts.Campaign():
            claim = Claim(name=me.name, incarnation=me.incarnation)
            return _made((Compare.mod_revision(leader, action.expected),), Put(leader, encode(claim), lease))
        case acts.Seal():
            number, attempt = action.history.number, action.history.attempt
            return _made(
                (
                    *leads(action.token),
                    Compare.mod_revision(record, action.previous),
                    *_standing(root, action.standing),
                ),
                *_formed(record, action.generation, action.base, brevity),
                *withdrawn,
                Put(root + keys.history(number, attempt), encode(action.history)),
                *_ruled(root, action.verdict),
                Delete(root + keys.history_of(number - HISTORY), prefix=True),
                Delete(root + keys.verdicts_of(number - HISTORY), prefix=True),
            )
        case acts.Propose():
            fence = (*leads(action.token), Compare.mod_revision(record, action.previous))
            return _made(fence, *_formed(proposal, action.proposal, action.base, brevity))
        case acts.Withdraw():
            return _made(leads(action.token), *withdrawn)
        case acts.PutEnd():
            conditions = (*leads(action.token), *_standing(root, action.standing))
            last = Put(root + keys.LAST_END, encode(LastEnd(end=action.end, term=action.term)), lease)
            return _made(conditions, Put(root + keys.END, encode(action.end)), last, *_ruled(root, action.verdict))
        case acts.PutVerdict():
            return _made(leads(action.token), *_ruled(root, action.verdict))
        case acts.PutQuarantine():
            put = Put(root + keys.quarantine(action.place), encode(action.quarantine), lease)
            return _made(leads(action.token), put)
        case acts.PutFlap():
            return _made(leads(action.token), Put(root + keys.flap(action.place), encode(action.flap), lease))
        case acts.Mend():
            fence = (*leads(action.token), Compare.mod_revision(record, action.previous))
            return _made(fence, *_formed(record, action.generation, action.base, brevity))
        case acts.Sweep():
            fence = (*leads(action.token), Compare.mod_revision(root + action.key, action.revision))
            return _made(fence, Delete(root + action.key))
        case acts.Clear():
            cleared = (
                *(keys.tomb(id) for id in action.tombs),
                *(keys.doubt(id) for id in action.doubts),
                *(keys.drain(name) for name in action.drains),
            )
            return _made(leads(action.token), *(Delete(root + key) for key in cleared))


def pulse(root: str, me: Node, content: Pulse, registered: int, reported: int, lease: int) -> Transaction:
    """Return what to send for a pulse; it fails if the member's keys do not have these revisions any more.

    reported: 0 if there is no report yet.
    """
    there = [Compare.mod_revision(root + keys.member(me.id), registered)]
    if reported:
        there.append(Compare.mod_revision(root + keys.report(me.id), reported))
    return _made(tuple(there), Put(root + keys.pulse(me.id), encode(content), lease))


def goodput(root: str, token: int, value: bytes) -> Transaction:
    """Return what to send to write the account of the run's time, as the leader of this token."""
    return _made((Compare.mod_revision(root + keys.LEADER, token),), Put(root + keys.GOODPUT, value))


def events_of(me: Node, action: acts.Write, revision: int) -> tuple[e.Event, ...]:
    """Return the events that the core hears at once of a write that succeeded at `revision`; the watch's come later."""
    match action:
        case acts.PutMember():
            return (e.Registered(revision=revision),)
        case acts.Bury():
            return (
                e.TombPut(id=action.id, tomb=action.tomb, revision=revision),
                e.MemberGone(id=action.id, revision=revision),
            )
        case acts.Campaign():
            return (e.LeaderPut(claim=Claim(name=me.name, incarnation=me.incarnation), revision=revision),)
        case acts.Seal():
            return (
                e.GenerationPut(generation=action.generation, revision=revision),
                e.ProposalGone(revision=revision),
            )
        case acts.Mend():
            return (e.GenerationPut(generation=action.generation, revision=revision),)
        case acts.Propose():
            return (e.ProposalPut(proposal=action.proposal, revision=revision),)
        case acts.Withdraw():
            return (e.ProposalGone(revision=revision),)
        case acts.PutEnd():
            return (e.EndPut(end=action.end, revision=revision),)
        case acts.PutQuarantine():
            return (e.QuarantinePut(place=action.place, quarantine=action.quarantine, revision=revision),)
        case acts.PutFlap():
            return (e.FlapPut(place=action.place, flap=action.flap, revision=revision),)
        case acts.Clear():
            return (
                *(e.TombGone(id=id, revision=revision) for id in action.tombs),
                *(e.DoubtGone(id=id, revision=revision) for id in action.doubts),
                *(e.DrainGone(name=name, revision=revision) for name in action.drains),
            )
        case _:
            return ()


def _formed(
    key: str, record: Generation | Proposal, base: Generation | None, brevity: Brevity
) -> tuple[Operation, Operation]:
    """Return the writes of a generation to a key of the board: whole, or its changes with the whole beside them."""
    whole = encode(record)
    if base is not None and len(whole) > brevity.beyond:
        change = encode_change(record, base)
        if len(change) <= brevity.share * len(whole):
            formed = encode(record.generation) if isinstance(record, Proposal) else whole
            return Put(key, change), Put(keys.whole(key), formed)
    return Put(key, whole), Delete(keys.whole(key))


def _standing(root: str, stalls: Iterable[tuple[str, int]]) -> tuple[Compare, ...]:
    return tuple(Compare.create_revision(root + keys.stall(id), created) for id, created in stalls)


def _ruled(root: str, verdict: Verdict | None) -> tuple[Put, ...]:
    return () if verdict is None else (Put(root + keys.verdict(verdict.key), encode(verdict)),)


def _not_buried(root: str, me: Node) -> tuple[Compare, ...]:
    return (Compare.absent(root + keys.tomb(me.id)),)


def _made(conditions: tuple[Compare, ...], *operations: Operation) -> Transaction:
    return Transaction(conditions=conditions, operations=operations)
