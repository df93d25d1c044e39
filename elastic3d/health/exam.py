"""The entrance exam of nodes that come into a generation: who is let in, and who is not. Pure.

A node that was not in the generation before may compute wrongly from its first step on, and the next audit may be
dozens of steps away. So the first step of a generation with newcomers begins with an exam: after all ranks have their
state, and before anything of the step counts, every dp column runs one and the same micro-batch over the real weights,
and the ranks of each place compare digests of all that they came to. Those who were there before, and have agreed with
others in an audit since they came, know the right answer; it is computed by two of them at once wherever dp allows. Who
fails is set aside before any update has anything of it.

The exam is a round of the whole new generation, not one beside the running trainers: only there does a newcomer have
its place, its share of the state, and neighbours that hand it real inputs, whatever the layout, the model and the
devices, which trainers of two generations cannot share. So a node that fails costs one more re-forming, and no step.

| what the exam and its hearing say | who is set aside |
|---|---|
| all agree | nobody |
| two independent ranks agree, others differ again | those that differ, newcomers or not |
| a newcomer differed, and agrees now | the newcomer: it has erred in one round of one |
| no two independent ranks agree, and those who were there before agree with each other | the newcomers that differ |
| those who were there before do not agree, or all are newcomers | nobody; it is reported |

With dp 2 it is one word against another, and the burden of proof is on the newcomer: where the other one has begun to
err since its last audit, an honest newcomer is set aside, and only that. Nothing made before is doubted for it.

Covered is the forward and backward pass of the newcomer's own place: its stage and its part of each tensor, over the
inputs that its pipeline hands it. Not covered are the optimizer's arithmetic, what is gathered and sent, and state that
was already wrong when all ranks got it. Where nothing is audited there is no exam either, and `audit.off` says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic3d.data.permutation import key
from elastic3d.health.hearing import Finding, Hearing


def leaf_of(seed: int, step: int, leaves: int) -> int:
    """Return which leaf of a step all columns compute in an exam, of `leaves` that the step has."""
    return int(key("exam", seed, step)) % leaves


def refused_ranks(hearing: Hearing, said: Mapping[int, int], newcomers: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that are set aside.

    hearing: what the repetition of the exam found. said: by rank of the place in dispute, the digest in the exam.
    """
    match hearing.finding:
        case Finding.PERSISTENT:
            return hearing.culprits
        case Finding.TRANSIENT:
            return tuple(rank for rank in hearing.culprits if rank in newcomers)
        case Finding.UNDECIDED:
            known = {digest for rank, digest in said.items() if rank not in newcomers}
            if len(known) == 1:
                return tuple(sorted(rank for rank, digest in said.items() if digest not in known))
    return ()
