"""Faults by which the script raises, and samples that are at fault: what a judge holds against a job for them."""

from __future__ import annotations

from dataclasses import replace

from chaos.faults.code import Raised
from chaos.faults.data import Nan
from chaos.faults.moment import When
from chaos.history.claims import Accusation
from chaos.history.follow import Injection
from chaos.judging.oracle import judge
from tests.chaos.judging.test_oracle import outcome, quiet
from tests.chaos.made_up_events import a_death_and_a_join

AT = When(step=3)


def test_a_script_that_was_made_to_raise_breaks_no_promise() -> None:
    """One that raises by itself does; whether anything else raised is not judged then."""
    seen = outcome(a_death_and_a_join())
    seen = replace(seen, picture=replace(seen.picture, errors=("RuntimeError: no",)))
    assert "user code raised: RuntimeError: no" in " ".join(judge(seen, quiet()).broken)
    made = judge(replace(seen, made=((Raised(when=AT), 3.0),)), quiet())
    assert made.kept
    (raising,) = (one for one in made.promises if one.says == "nothing that happens makes the script raise")
    assert (raising.held, raising.seen) == (None, "raise makes it raise")


def test_nobody_may_be_named_for_samples_that_are_at_fault() -> None:
    """Also not the rank that says when it happens."""
    seen = outcome(a_death_and_a_join())
    named = Accusation(event="node.lying", at=4.0, nodes=("node0",), detail="")
    seen = replace(
        seen,
        picture=replace(seen.picture, accused=(named,)),
        made=((Nan(when=AT), 3.0),),
        injections=(Injection(kind="nan", node="node0", at=3.0),),
    )
    assert "node.lying named node0" in " ".join(judge(seen, quiet(), all_known=True).broken)
