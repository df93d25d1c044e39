"""How far audits vouch for each node, and which checkpoints are vetted by that: pure functions of what states say.

A state says of every node that was active when it was made up to which step audits vouch for it: at which step, last,
all of its ranks agreed with others. A checkpoint is vetted once every node that was active when it was made has agreed
at its step or a later one: whatever computed wrongly while it was made, and still did so at the next audit, would have
been found. Audits of the very step count, since they compare what was computed from that state.

What this does not say: a node that left between its last audit and the checkpoint is not among those that were active,
and what it computed in that time is in the weights. The states that a run began from before it was audited count as
sound, as they do when a device is convicted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

CLEAN_NODES = "clean_nodes"
"""The fact that has, by node, the newest step that audits vouch for."""


def clean_nodes(facts: Mapping[str, Any]) -> dict[str, int]:
    """Return, by node that was active, up to which step audits vouched for it where a state was saved; {} for nobody.

    Facts of states that no run saved, or an older version, say nothing.
    """
    said = facts.get(CLEAN_NODES)
    if not isinstance(said, Mapping):
        return {}
    return {str(node): step for node, step in said.items() if isinstance(step, int) and not isinstance(step, bool)}


def begun(saved: Mapping[str, int] | None, nodes: Collection[str], step: int) -> dict[str, int]:
    """Return what audits vouch for where a generation of these nodes begins, from the state of `step`.

    saved: what that state says; None if it was made without audits. Nothing is known of a node that was not active
    then: it may have been before, and have left without an audit.
    """
    known = saved or {}
    return {node: min(known.get(node, -1), step) for node in nodes}


def clean_now(
    newest: Mapping[str, int], made_in: int | None, live: Mapping[str, int], generation: int
) -> Mapping[str, int]:
    """Return, by node, up to which step audits vouch for it where a checkpoint is to be vetted.

    newest: what the newest checkpoint says, which was made in generation `made_in`. live: what generation `generation`
    has audited beyond that; of an older one it does not count, since the same steps may have been made again since.
    """
    return {**newest, **live} if made_in is not None and generation >= made_in else newest


def vets(made_by: Mapping[str, int], step: int, clean: Mapping[str, int]) -> bool:
    """Return whether a checkpoint of `step` is vetted.

    made_by: by node that was active when it was made, what its own facts say. clean: by node, the newest step that
    audits vouch for now.
    """
    return bool(made_by) and all(clean.get(node, -1) >= step for node in made_by)
