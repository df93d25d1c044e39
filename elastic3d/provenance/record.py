"""The provenance of a state as one value. It is found once per process, and rank 0's is that of all ranks.

Nothing in it changes within a generation, so that it travels as one text with each snapshot; a checkpoint's record has
it as an object, covered by the root.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic3d import environment
from elastic3d.provenance import code, packages
from elastic3d.provenance.code import CodeState
from elastic3d.provenance.config import canonical, digest, plain
from elastic3d.provenance.model import ModelRecord
from elastic3d.values import from_json, to_json

FACT = "provenance"
"""Its name among the facts of a state."""
MOST_EARLIER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierCode:
    """What made the steps up to one, where it was not what made those after it."""

    generation: int
    """The last that it made."""
    step: int
    """The last that it made, and that counts."""
    revision: str
    """Git's, "" for none."""
    code: str
    """Digest of all that is known of the code."""
    config: str
    """Version of the configuration, "" where none was given."""
    torch: str
    """Version of torch."""
    elastic3d: str
    """Version of elastic3d."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What made a state."""

    config: dict[str, Any] | None = None
    """The configuration as plain data, None where none was given."""
    config_version: str = ""
    """Its digest."""
    code: CodeState
    """The user's code on the node of rank 0."""
    packages: dict[str, str]
    """Versions by distribution, and Python's."""
    packages_left_out: int = 0
    """How many were imported besides."""
    model_seed: int = 0
    """Of initial weights and dropout."""
    model: ModelRecord | None = None
    """What the model says of itself; None for one that is not of transformers, or has more than is kept."""
    earlier: tuple[EarlierCode, ...] = ()
    """What made the steps before, oldest first; the newest are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOrigin:
    """What a process knows of where its states come from, before the script's `main` has begun."""

    config: dict[str, Any] | None = None
    """The configuration as plain data, None where none was given."""

    @property
    def version(self) -> str:
        """The configuration's digest, "" for none."""
        return "" if self.config is None else digest(self.config)

    def provenance(self, model_seed: int, model: ModelRecord | None = None) -> Provenance:
        """Return the provenance of states that this process makes; what it imported since it began is looked up.

        model: what the model says of itself.
        """
        root, begun, seen = _code()
        named = packages.distributions(_distributions())
        by_name, left_out = packages.versions(named.values())
        return Provenance(
            config=self.config,
            config_version=self.version,
            code=begun if root is None else code.imported_since(root, begun, seen),
            packages=by_name,
            packages_left_out=left_out,
            model_seed=model_seed,
            model=model,
        )


def begin(config: object) -> ScriptOrigin:
    """Return the origin of a script that calls `elastic3d.run`; UsageError for a configuration that cannot be kept.

    The code and packages are looked at here, once, in the process that others of its slot are forked from: files that
    are changed later are not those that run. Only the first slot of a node does that before it is asked, as the first
    rank is on it.
    """
    made = ScriptOrigin(config=None if config is None else plain(config))
    if environment.TORCH_RUN_ID.read() and environment.LOCAL_RANK.read() == "0":
        _code()
        packages.versions(_distributions().values())
    return made


@functools.cache
def _code() -> tuple[Path | None, CodeState, frozenset[str]]:
    """Return the folder, the code in it, and the modules that were imported by then."""
    seen = frozenset(sys.modules)
    return *code.of_process(), seen


@functools.cache
def _distributions() -> Mapping[str, str]:
    return packages.distributions()


def follow(now: Provenance, saved: Provenance | None, *, generation: int, step: int) -> Provenance:
    """Return the provenance of states that go on from a saved one. generation, step: of that one."""
    if saved is None:
        return now
    then = EarlierCode(
        generation=generation,
        step=step,
        revision=saved.code.revision,
        code=digest(to_json(saved.code)),
        config=saved.config_version,
        torch=saved.packages.get("torch", ""),
        elastic3d=saved.packages.get("elastic3d", ""),
    )
    same = then.code == digest(to_json(now.code)) and then.config == now.config_version
    same = same and all(saved.packages.get(name) == now.packages.get(name) for name in packages.ALWAYS)
    return replace(now, earlier=saved.earlier if same else (*saved.earlier, then)[-MOST_EARLIER:])


def encode(provenance: Provenance) -> str:
    """Return it as the text that `decode` reads."""
    return canonical(to_json(provenance))


def decode(text: str) -> Provenance | None:
    """Return the provenance in a text, None in ""; ValueError, TypeError or KeyError for another text."""
    return from_json(Provenance, json.loads(text)) if text else None


def spelled_out(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a snapshot as they are written into a checkpoint: the provenance is an object there."""
    text = facts.get(FACT)
    return {**facts, FACT: json.loads(text)} if isinstance(text, str) and text else dict(facts)


def of_facts(facts: Mapping[str, Any] | None) -> Provenance | None:
    """Return the provenance in the facts of a checkpoint or a snapshot, None where they have none.

    ValueError, TypeError or KeyError if it cannot be read.
    """
    fact = None if facts is None else facts.get(FACT)
    if not fact:
        return None
    return decode(fact) if isinstance(fact, str) else from_json(Provenance, fact)


def packed(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of a checkpoint as those of a snapshot are."""
    fact = facts.get(FACT)
    return {**facts, FACT: canonical(fact)} if isinstance(fact, Mapping) else facts
