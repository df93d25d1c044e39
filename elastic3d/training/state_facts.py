"""What a saved state says beside its tensors: written here, and read here, once, where it comes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from elastic3d.data import Order
from elastic3d.data.ledger import Line
from elastic3d.data.noise import NoiseScale
from elastic3d.errors import StateUnfit
from elastic3d.health.numerics import Losses
from elastic3d.health.vetted import CLEAN_NODES
from elastic3d.parallel.numerics.scale import LossScale
from elastic3d.pretrained import adapter_files
from elastic3d.pretrained.weights import KeptWeights
from elastic3d.provenance import record
from elastic3d.provenance.record import Provenance
from elastic3d.rollback import Rollback
from elastic3d.training.checkpoint_timer import NOTHING_UNSAVED, Unsaved
from elastic3d.training.mixture_facts import check_mixture
from elastic3d.values import from_json, to_json

_AUDIT_COST = "audit_cost"
_BEGUN_FROM = "begun_from"
_CHANGED = "changed"
_CLEAN = "clean"
_EXTRA = "extra"
_LOSSES = "losses"
_NOISE = "noise"
_NONDETERMINISM = "nondeterminism"
_LOSS, NO_LOSS = "loss", "nan"
_UNSAVED = "unsaved"
_WEIGHTS = "weights"
_SAMPLES = "samples"
_ROLLBACKS, _SPIKE, _SKIPPED = "rollbacks", "spike", "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedState:
    """What the script asked for when the run began, as far as it can be written down."""

    optimizer: str
    """Name of the optimizer's class."""
    schedule: str
    """Name of the schedule's class, "" for none."""
    micro_batch: int
    """Samples of a micro-batch."""
    groups: tuple[dict[str, Any], ...]
    """Hyperparameters of each parameter group, as `parallel.facts` encodes them."""
    schedule_state: Any
    """The schedule's state, encoded likewise; None without one."""
    leaf: int = 1
    """Micro-batches of a leaf; states of versions without leaves are of 1."""
    chunks: int = 1
    """Into which sequences are cut; likewise."""
    budget: str = ""
    """The budget of tokens by which micro-batches are cut, in words; "" where they are of one number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptExtra:
    """What a state says of an object of the script's own, beside its tensors."""

    kind: str
    """Name of its class."""
    state: Any
    """Its values that are no tensors, as `parallel.extra_tree` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nondeterminism:
    """Equal inputs did not give equal bits, as audits of a run found.

    step: that would have been made of the audited passes. script: digest of the script. detail: of the hearing.
    """

    step: int
    script: str
    detail: str

    def __str__(self) -> str:
        """Return why nothing is audited, for people."""
        return (
            f"equal inputs did not give equal bits in step {self.step}: {self.detail}; nobody could be convicted by "
            "audits, which begin again with another script"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    """How far the run's numbers can be relied on, equal on all ranks."""

    clean: int | None = None
    """The newest step that audits vouch for; None where nothing is audited, and in states of older versions."""
    losses: Losses | None = None
    """The latest losses; None where nobody compares them, and in states of older versions."""
    clean_nodes: dict[str, int] | None = None
    """The newest step that audits vouch for by node that was active; None likewise."""
    nondeterminism: Nondeterminism | None = None
    """Why audits are off for this run, None if they need not be."""
    audit_cost: float | None = None
    """What an audit costs in proportion to its rounds, as all ranks agree; None where nobody measured it."""
    rollbacks: tuple[Rollback, ...] = ()
    """What the run has left out since its loss jumped up, oldest first."""
    spike: int = -1
    """The newest step in which its loss had jumped up, -1 for none."""
    skipped: int = 0
    """How many of its updates were skipped because they were not finite."""


def fields_of(health: HealthFacts) -> dict[str, Any]:
    """Return them by name."""
    return {one.name: getattr(health, one.name) for one in fields(HealthFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts(HealthFacts):
    """The state that is no tensor, equal on all ranks."""

    step: int
    """It is of this step."""
    order: Order
    """In which samples are consumed."""
    ledger: tuple[Line, ...]
    """Which steps consumed which samples."""
    optimizer_groups: tuple[Any, ...]
    """Hyperparameters of each parameter group, encoded."""
    schedule: Any
    """The schedule's state, encoded; None without one."""
    cursor: Any = None
    """Where a data set without positions was, encoded; None for one with positions."""
    data: str = ""
    """Fingerprint of the data set, "" for one that has none."""
    samples: str = ""
    """Digest of the run's first micro-batch; "" where there is none, and in states of older versions."""
    loss_scale: LossScale | None = None
    """The loss scale; None where there is none."""
    asked: AskedState | None = None
    """What the script asked for; None in states of older versions, which do not say."""
    begun_from: str = ""
    """The checkpoint that `restore=` named and the run went back to, "" for none."""
    loss: str = NO_LOSS
    """The loss of the last step, in hexadecimal, "nan" for none, and in states of older versions."""
    extra: dict[str, KeptExtra] = field(default_factory=dict)
    """What the script has kept of its own, by name."""
    weights: KeptWeights | None = None
    """What the run began with, None for what its seed gave, and in states of older versions."""
    adapters: dict[str, Any] = field(default_factory=dict)
    """Configurations of the adapters that peft has put into the model, by their names."""
    provenance: str = ""
    """What made it, as `provenance.record` encodes it; "" where it does not say, and in states of older versions."""
    noise: NoiseScale | None = None
    """What is known of its gradient's noise; None where the global batch does not follow it."""
    changed: str = ""
    """What is otherwise from the next step on than before, in words, for the ledger; "" for nothing."""
    unsaved: Unsaved = NOTHING_UNSAVED
    """What the run's generations hand on of its last checkpoint."""

    @property
    def last_loss(self) -> float:
        """The loss of the last step, NaN where it is not known."""
        return float.fromhex(self.loss)


def to_plain(facts: StateFacts) -> dict[str, Any]:
    """Return facts as plain JSON data, as they are kept with a state."""
    plain: dict[str, Any] = to_json(facts)
    if not facts.begun_from:
        del plain[_BEGUN_FROM]
    if not facts.extra:
        del plain[_EXTRA]
    if facts.weights is None:
        del plain[_WEIGHTS]
    if not facts.adapters:
        del plain[adapter_files.FACT]
    if facts.clean is None:
        del plain[_CLEAN]
    if facts.noise is None:
        del plain[_NOISE]
    if facts.unsaved == NOTHING_UNSAVED:
        del plain[_UNSAVED]
    if facts.losses is None:
        del plain[_LOSSES]
    if facts.clean_nodes is None:
        del plain[CLEAN_NODES]
    if facts.audit_cost is None:
        del plain[_AUDIT_COST]
    if facts.nondeterminism is None:
        del plain[_NONDETERMINISM]
    for name, nothing in (
        (_ROLLBACKS, ()),
        (_SPIKE, -1),
        (_SKIPPED, 0),
        (_LOSS, NO_LOSS),
        (_SAMPLES, ""),
        (_CHANGED, ""),
        (record.FACT, ""),
    ):
        if getattr(facts, name) == nothing:
            del plain[name]
    return plain


def made_by(facts: StateFacts) -> Provenance | None:
    """Return what made a state, None where it does not say."""
    return record.decode(facts.provenance)


_ACCEPT = '; where the data set has grown on purpose, say so: run.restore(..., accept="data")'


def by_a_run(plain: Mapping[str, Any]) -> bool:
    """Return whether a run has saved this: it says which samples were consumed."""
    return "order" in plain


def begun_from(plain: Mapping[str, Any]) -> str:
    """Return what `restore=` had named where a state was saved, whoever saved it; "" for nothing."""
    return str(plain.get(_BEGUN_FROM, ""))


def parse(plain: Mapping[str, Any] | None, step: int) -> StateFacts:
    """Return the facts of the state of a step; StateUnfit for what no run has saved, or not whole."""
    if plain is None:
        raise StateUnfit(f"the state of step {step} has no facts beside its tensors; it was not saved by a run")
    try:
        facts = from_json(StateFacts, record.packed(plain))
        _ = facts.last_loss, made_by(facts)
    except (OverflowError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise StateUnfit(
            f"what the state of step {step} says beside its tensors cannot be read: {error}. Trying again does not "
            "help: upgrade if a newer version saved it, or go back to another checkpoint with restore="
        ) from error
    return facts


def data_change(facts: StateFacts, order: Order, data: str = "", samples: str = "") -> str:
    """Return in words how the data set is another one than that of a state, "" where it is not, as far as is known.

    data: its fingerprint. samples: digest of the run's first micro-batch.
    """
    if facts.order.length != order.length and order.proportions is None:
        return f"the data set had {facts.order.length} samples and has {order.length} from here on"
    if facts.data and data and facts.data != data:
        return f"the data set was {facts.data} and is {data} from here on"
    alike = all(getattr(facts.order, name) == getattr(order, name) for name in _OF_THE_FIRST)
    if alike and facts.samples and samples and facts.samples != samples:
        return (
            "the run's first micro-batch is made of the same numbers of the data set as before, and is another one: "
            "files, collate=, or the packages that read samples have changed"
        )
    return ""


_OF_THE_FIRST = ("length", "earlier", "global_batch", "micro_batch", "seed", "holes", "strata", "proportions", "budget")
"""Of an order, what settles which samples a run's first micro-batch has."""


def check_facts(facts: StateFacts, step: int, order: Order, data: str = "", *, accept: Collection[str] = ()) -> str:
    """Accept the facts of the state of a step; StateUnfit if its samples were counted in another order than these.

    The micro-batch may differ: it changes the bits, but not which samples are consumed. data: the data set's
    fingerprint; a data set without one is taken on trust. accept: what may have changed (`identity.ACCEPTED`).
    Returns in words what a mixture has otherwise from here on, "" for nothing.
    """
    saved = facts.order
    numbered = saved.length is not None, order.length is not None
    if "data" in accept and numbered[0] == numbered[1]:
        saved, data = replace(saved, length=order.length), ""
    mixed = saved.proportions is not None or order.proportions is not None
    for name in ("global_batch", "seed") if mixed else ("length", "global_batch", "seed"):
        then, now = getattr(saved, name), getattr(order, name)
        if name == "global_batch" and order.adaptive is None:
            then, now = saved.taken(step), order.taken(step)
        if then != now:
            raise StateUnfit(
                f"the state of step {step} was trained with {name}={then} and run.batches now has {now}: its "
                "samples could not be accounted for. Trying again does not help: go back to the old value, or start a "
                f"new run{_ACCEPT if name == 'length' and all(numbered) else ''}"
            )
    said = check_mixture(saved, order.sized_as(saved, step), step)
    then = facts.data
    if then and data and then != data:
        raise StateUnfit(
            f"the state of step {step} was trained on the data set {then} and run.batches now has {data}: its "
            "samples could not be accounted for. Trying again does not help: go back to the old files, or start a new "
            f"run{_ACCEPT}"
        )
    return said
