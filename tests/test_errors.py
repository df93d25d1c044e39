"""Every error that elastic3d raises for people is in the tree of `elastic3d.errors`."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

from elastic3d import errors

ROOT = Path(__file__).parent.parent

CAUGHT_INSIDE = {
    "Unfit": "admission.check, which makes it AdmissionFailed",
    "Reached": "pipeline.absent.run_between, around the stage's forward",
    "_Seen": "calibration.block, from the block's own input",
    "_Interrupted": "trackers.writing, which closes the tracker",
    "_ProfileMade": "calibration.script_question, out of the user's main",
    "Unstorable": "data.cached, which makes the sample each time, and says so",
    "Damaged": "data.cached, which makes the sample again, and says so",
    "Drawn": "data.batches, where a stream has ended",
    "CannotRepeat": "training.updates, which says what is not checked",
    "Deleted": "islands.member and islands.outer_parameters, which begin anew from newer outer parameters",
    "Stopped": "doctor.running, which says at what the check was",
    "RpcFailure": "etcd.session, which makes it an EtcdError",
    "ListAgain": "etcd.watch",
    "Convicted": "training.run, which has the port end the trainer",
    "Unheard": "notices.watcher, which tries again and says so",
    "OutsidePromise": "a warning",
    "EarlyLoss": "a warning",
    "StoreBusy": "dashboard.serving, which answers a browser with it",
    "GenerationOver": "rendezvous.restart, which goes on to the next one",
    "WaitedTooLong": "rendezvous.store, which answers torchrun as its protocol has it",
    "NoRoom": "snapshots.server, which answers with it",
    "Stale": "snapshots.replicate, which says so in an event",
    "Altered": "snapshots.replicate, which tells its slot",
    "Denied": "snapshots.server, which answers with it",
    "UnknownTable": "snapshots.server, which asks for the whole table",
    "WireError": "snapshots.client, which goes to the next holder",
    "HandshakeInterrupted": "snapshots.client, as any WireError",
    "Garbled": "membership.driver.wire, which closes the connection and says so",
    "Forged": "trust.channel and rendezvous, which close the connection and say so",
    "FrameTooLong": "whoever reads the connection, which is closed",
    "HandshakeRejected": "trust.channel and rendezvous, which close the connection and say so",
    "TemplateLost": "worker.processes.loop, which starts another",
    "TrainerUnkillable": "worker.processes.loop, which gives the slot up",
}
"""Exceptions that are not errors of elastic3d, with the code that catches them."""

BARE = {
    "elastic3d/__init__.py": "AttributeError is how a module says that it has no such name",
    "elastic3d/accounting/live_record.py": "a record that cannot be read; its reader says which key and why",
    "elastic3d/cli/ckpt/completing.py": "caught there: a shell completes nothing",
    "elastic3d/data/cached.py": "AttributeError is how an object says that it has no such name",
    "elastic3d/data/mixture.py": "IndexError is how a data set ends",
    "elastic3d/data/packing.py": "IndexError is how a data set ends",
    "elastic3d/data/permutation.py": "an invariant of positions",
    "elastic3d/data/remote.py": "IndexError is how a data set ends",
    "elastic3d/data/stratified.py": "IndexError is how a data set ends",
    "elastic3d/data/tokens.py": "IndexError is how a data set ends",
    "elastic3d/event_file.py": "caught there, as a disk that is full is, and said",
    "elastic3d/event_process.py": "an error of the disk, raised again in the process that asked",
    "elastic3d/health/evidence.py": "caught there, as a disk that is full is, and said",
    "elastic3d/health/past_verdicts.py": "caught there: the file is left out, and said",
    "elastic3d/integrations/transformers/trainer.py": "AttributeError is how an object says that it has no such name",
    "elastic3d/log.py": "an invariant: the event is not in the list",
    "elastic3d/membership/changes.py": "a record that cannot be read; its reader says which key and why",
    "elastic3d/membership/encoding.py": "a record that cannot be read; its reader says which key and why",
    "elastic3d/membership/records.py": "a record that cannot be read; its reader says which key and why",
    "elastic3d/rendezvous/table.py": "garbage on a connection, which is closed",
    "elastic3d/snapshots/arena.py": "an invariant of sizes",
    "elastic3d/snapshots/server.py": "garbage on a connection, which is closed",
    "elastic3d/snapshots/table.py": "garbage on a connection, which is closed",
    "elastic3d/snapshots/wire.py": "an address that cannot be read, by its callers",
    "elastic3d/tagged.py": "what cannot be read; its reader says what and why",
    "elastic3d/trust/channel.py": "a connection that ended, as the socket's own errors",
    "elastic3d/trust/credentials.py": "an invariant: the secret is made by elastic3d itself",
    "elastic3d/trust/handshake.py": "an invariant of identities",
    "elastic3d/snapshots/offer_columns.py": "where a sequence ends; digests were checked before",
    "elastic3d/values.py": "what cannot be read; its reader says what and why",
    "elastic3d/worker/options.py": "TypeError is Python's own for a keyword that a function does not take",
    "elastic3d/worker/processes/channel.py": "garbage on a connection, which is closed",
    "elastic3d/worker/processes/copying.py": "an invariant of tiles and their tensors",
    "elastic3d/worker/processes/process.py": "what the kernel answered",
    "elastic3d/snapshots/lending.py": "a connection that ended, as the socket's own errors: TCP serves instead",
    "elastic3d/trust/local.py": "a connection that ended or is another user's, as the socket's own errors",
}
"""Modules that raise Python's own exceptions, with the reason why only their callers see them."""


def trees() -> dict[str, ast.Module]:
    """Return the modules of elastic3d by path."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted((ROOT / "elastic3d").rglob("*.py"))
    }


def exceptions() -> dict[str, tuple[str, ...]]:
    """Return the exception classes of elastic3d, with the names of all their bases."""
    bases = {
        node.name: tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def above(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(up for base in bases.get(name, ()) for up in (base, *above(base))))

    every = {name: above(name) for name in bases}
    return {name: up for name, up in every.items() if any(map(_builtin, up))}


def _builtin(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def test_every_error_has_one_base_and_is_in_the_tree() -> None:
    """Including those defined beside the code that raises them; internal ones are marked as internal."""
    assert errors.__doc__ is not None
    listed = set(errors.__doc__.split())
    known = exceptions()
    for name, above in known.items():
        if "Elastic3dError" in above:
            assert name in listed or name.startswith("_"), (
                f"{name} is missing in the tree at the head of elastic3d/errors.py"
            )
        elif name != "Elastic3dError":
            assert name in CAUGHT_INSIDE, f"{name} is no Elastic3dError: derive it from one, or say here who catches it"
    assert CAUGHT_INSIDE.keys() <= known.keys()


def test_no_bare_python_error_is_raised_to_users() -> None:
    """A bare ValueError says neither whether trying again helps nor what to do."""
    raised: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                name = node.exc.func.id
                if _builtin(name) and name not in ("AssertionError", "SystemExit"):
                    raised.setdefault(path, []).append(f"{path}:{node.lineno} raises {name}")
    new = [line for path, lines in raised.items() if path not in BARE for line in lines]
    assert not new, "raise an error of elastic3d.errors, or say in BARE who sees it:\n" + "\n".join(new)
    assert BARE.keys() <= raised.keys()


def test_the_base_of_the_tree_is_never_raised_itself() -> None:
    """Nobody could catch one error of elastic3d and not all the others."""
    bare = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func).rpartition(".")[2] in ("Elastic3dError", "EtcdError")
    ]
    assert not bare
