"""What the record says after a device was convicted, and who goes by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic3d.distrust import Distrust
from elastic3d.etcd import Put
from elastic3d.membership import events as e
from elastic3d.membership.driver.ended import emptied
from elastic3d.membership.records import decode, encode
from elastic3d.rollback import Rollback
from elastic3d.values import Cause, Generation
from tests.membership.story import ROOT, Story

START = "> policy minimum=1 maximum=3\n> start a b c d\n> run 3\n> step 40\n"
FIVE = "> policy minimum=1 maximum=5\n> start a b c d e\n> run 3\n> step 40\n"
RULE = Distrust(before=2, step=30)


def test_all_generations_that_follow_know_the_rule() -> None:
    """Those formed for a death, and those that were proposed for a node that comes back."""
    story = Story()
    story.tell(START + "> lost a 30\n> lies b 30\n> lost c 30\n> run 3\n> kill a\n> run 12\n> start e\n> run 20")
    assert [generation.distrusted for generation in story.sealed] == [(), *[(RULE,)] * (len(story.sealed) - 1)]
    assert {Cause.LYING, Cause.DEATH, Cause.JOIN} <= {generation.cause for generation in story.sealed}
    assert "goes on from the state of step 30" in story.sealed[1].detail


def test_steps_that_are_made_again_are_progress() -> None:
    """No step beyond the rule was reached: an error behind it is the first of its kind, and is tried again."""
    story = Story()
    story.tell(START + "> lost a 30\n> lies b 30\n> lost c 30\n> run 3\n> step 31\n> run 1\n> error a\n> run 5")
    last = story.sealed[-1]
    assert (last.cause, last.tries, last.tried_at) == (Cause.ERROR, 1, 31)
    story = Story()
    story.tell(START + "> error a\n> run 5\n> step 60\n> lost a 30\n> lies b 30\n> lost c 30\n> run 3")
    assert (story.sealed[-1].cause, story.sealed[-1].tried_at) == (Cause.LYING, 30)


def test_what_was_safe_beyond_the_rule_is_not_claimed() -> None:
    """A run that goes back to its beginning may begin there: no step of it is in memory that counts."""
    story = Story()
    story.tell(START)
    for core in story.cores.values():
        core.report = replace(core.report, safe=40)
    story.tell("> lost a 0\n> lies b 0\n> lost c 0\n> run 3")
    assert [generation.reached for generation in story.sealed] == [0, 0]
    assert {core.report.safe for core in story.cores.values()} == {0}


def test_a_job_that_ends_leaves_the_rule_to_the_next_one() -> None:
    """What it refuses may be in the store, and what is newest there is what the next job begins from."""
    story = Story()
    story.tell("> policy minimum=3 maximum=3 below_minimum=5\n> start a b c\n> run 3\n> step 40\n")
    story.tell("> lost a 30\n> lies b 30\n> lost c 30\n> run 30")
    assert len(story.sealed) == 1
    left = story.generation
    assert left is not None
    assert left.distrusted == (RULE,)
    following = Story()
    following.publish(following.operate(Put(f"{ROOT}board/generation", encode(emptied(left)))))
    following.tell("> start a b c\n> run 3")
    assert (following.sealed[0].number, following.sealed[0].distrusted) == (2, (RULE,))


def test_nothing_is_written_for_a_loss_without_a_conviction() -> None:
    """A peer that is lost, or a trainer that dies, says nothing of audits."""
    story = Story()
    story.tell(START + "> lost a\n> fail b\n> lost c\n> run 8")
    assert [generation.distrusted for generation in story.sealed] == [(), ()]
    assert not any("distrusts" in line for line in story.lines)


def kept_out(story: Story) -> set[str]:
    return {line.split()[3] for line in story.lines if ": quarantine " in line}


def test_who_dies_before_it_can_say_that_it_lies_is_kept_out_all_the_same() -> None:
    """Two others were there when it was convicted. One word alone may be a liar's own, and puts nobody out."""
    story = Story()
    story.tell(START + "> accuse b a c 30\n> kill b\n> run 8\n> start b\n> run 12")
    assert kept_out(story) == {"b"}
    assert {node.name for node in story.sealed[-1].nodes} == {"a", "c", "d"}
    silent = Story()
    silent.tell(START + "> accuse b a c 30\n> lost b 30\n> run 8")
    assert [generation.cause for generation in silent.sealed] == [Cause.START, Cause.LYING]
    assert kept_out(silent) == {"b"}
    alone = Story()
    alone.tell(START + "> accuse b a 30\n> lost b c 30\n> run 8")
    assert kept_out(alone) == set()
    assert all("b" in {node.name for node in generation.nodes} for generation in alone.sealed)


def test_who_says_so_itself_and_of_whom_others_say_so_counts_once() -> None:
    """The witnesses tell a leader that hears them first no other story than the culprit does."""
    story = Story()
    story.tell(START + "> accuse b a c 30\n> lies b 30\n> run 12")
    assert [generation.cause for generation in story.sealed] == [Cause.START, Cause.LYING]
    assert kept_out(story) == {"b"}


@pytest.mark.parametrize("words", ["> lies b", "> accuse b a c\n> lies b", "> accuse b a c\n> lost b"])
def test_who_is_convicted_before_it_made_a_step_is_kept_out_and_no_state_is_refused(words: str) -> None:
    """In the exam of a generation, or of memory that changed before the vote: nobody has to go back."""
    story = Story()
    story.tell(f"{START}{words}\n> run 8")
    assert kept_out(story) == {"b"}
    assert [(one.cause, one.distrusted) for one in story.sealed] == [(Cause.START, ()), (Cause.LYING, ())]
    assert {node.name for node in story.sealed[1].nodes} == {"a", "c", "d"}
    story.tell("> release b\n> kill a\n> run 12")
    assert sum(": quarantine b" in line for line in story.lines) == 1


def late(story: Story, culprit: str, clean: int) -> None:
    """Let all who live say of generation 1 that a device of `culprit` was convicted in it."""
    key = story.sealed[0].key
    accused = {node.id: node.place for node in story.sealed[0].nodes if node.name == culprit}
    for name in [name for name in story.cores if name != "d"]:
        if name == culprit:
            story.to(name, e.TrainerFailed(key=key, detail="wrong", clean=clean, accused=accused))
        else:
            story.to(name, e.TrainerLostPeer(key=key, clean=clean, accused=accused))


def test_a_conviction_is_heard_though_a_death_came_first() -> None:
    """The next generation was sealed before anybody spoke, and may train on a state that is not to be trusted."""
    story = Story()
    story.tell(START + "> kill a\n> run 0.2")
    assert [(one.number, one.cause) for one in story.sealed] == [(1, Cause.START), (2, Cause.DEATH)]
    late(story, "b", 30)
    story.tell("> run 8\n> step 50\n> run 2")
    assert kept_out(story) == {"b"}
    assert [one.cause for one in story.sealed[2:]] == [Cause.LYING]
    assert {node.name for node in story.sealed[2].nodes} == {"c", "d"}
    assert story.sealed[2].distrusted == (Distrust(before=3, step=30),)
    story.tell("> kill c\n> run 8")
    assert [one.cause for one in story.sealed[3:]] == [Cause.DEATH]


def test_a_conviction_is_heard_however_many_deaths_came_first() -> None:
    """Two generations were sealed before anybody spoke, and the words of the first still count, once."""
    story = Story()
    story.tell(FIVE + "> kill a\n> run 8\n> kill d\n> run 8")
    assert [one.cause for one in story.sealed] == [Cause.START, Cause.DEATH, Cause.DEATH]
    late(story, "b", 30)
    story.tell("> run 8\n> step 50\n> run 2")
    assert kept_out(story) == {"b"}
    assert [one.cause for one in story.sealed[3:]] == [Cause.LYING]
    assert {node.name for node in story.sealed[3].nodes} == {"c", "e"}
    assert story.sealed[3].distrusted == (Distrust(before=4, step=30),)
    assert list(story.sealed[3].convicted.values()) == [1]
    assert all(core.report.goes_back == () for core in story.cores.values()), "what the record has is not said again"
    story.tell("> release b\n> kill c\n> run 12")
    assert sum(": quarantine b" in line for line in story.lines) == 1
    assert story.sealed[-1].distrusted == (Distrust(before=4, step=30),)


def test_one_word_of_long_ago_puts_nobody_out() -> None:
    """Two nodes are believed against a third, of whatever generation they speak; each for itself, one is none."""
    story = Story()
    story.tell(START + "> kill a\n> run 8\n> kill d\n> run 8")
    first = story.sealed[0]
    accused = {node.id: node.place for node in first.nodes if node.name == "b"}
    story.to("c", e.TrainerLostPeer(key=first.key, clean=30, accused=accused))
    story.tell("> run 12\n> step 50\n> run 2")
    assert kept_out(story) == set()
    assert story.sealed[-1].distrusted != ()
    assert "b" in {node.name for node in story.sealed[-1].nodes}


def test_words_of_two_generations_are_both_heard() -> None:
    """The second conviction does not replace what the first one leaves to say, whichever is told first."""
    for first in (0, 1):
        story = Story()
        story.tell(FIVE + "> kill a\n> run 8")
        assert len(story.sealed) == 2
        words = []
        for sealed, culprit, clean in ((story.sealed[0], "b", 30), (story.sealed[1], "c", 35)):
            accused = {node.id: node.place for node in sealed.nodes if node.name == culprit}
            words.append((culprit, e.TrainerLostPeer(key=sealed.key, clean=clean, accused=accused)))
        for culprit, word in (words[first], words[1 - first]):
            for name in ("b", "c", "d", "e"):
                itself = e.TrainerFailed(key=word.key, detail="wrong", clean=word.clean, accused=word.accused)
                story.to(name, itself if name == culprit else word)
        story.tell("> run 12\n> step 50\n> run 2")
        assert kept_out(story) == {"b", "c"}
        assert {node.name for node in story.sealed[-1].nodes} == {"d", "e"}
        assert sorted(story.sealed[-1].convicted.values()) == [1, 2]


def test_a_convicted_node_that_is_gone_is_noted_without_another_generation() -> None:
    """The others go on from what counts, and a machine that is admitted again stays so, whoever leads by then."""
    story = Story()
    story.tell(START + "> kill b\n> run 8")
    late_of_the_gone = story.sealed[0]
    accused = {node.id: node.place for node in late_of_the_gone.nodes if node.name == "b"}
    for name in ("a", "c", "d"):
        story.to(name, e.TrainerLostPeer(key=late_of_the_gone.key, accused=accused))
    story.tell("> run 3")
    assert kept_out(story) == {"b"}
    assert len(story.sealed) == 2
    assert story.generation is not None
    assert list(story.generation.convicted.values()) == [1]
    story.tell("> release b\n> kill a\n> run 12")
    assert sum(": quarantine b" in line for line in story.lines) == 1


def test_a_run_does_not_end_well_with_what_a_convicted_device_made() -> None:
    """It is through, and hears late that what it has come to does not count: it goes back first."""
    story = Story()
    story.tell(START + "> kill a\n> run 8")
    late(story, "b", 30)
    story.tell("> finish b c d\n> run 12")
    assert all(core.view.end is None for core in story.cores.values())
    assert story.sealed[-1].cause is Cause.LYING
    assert {node.name for node in story.sealed[-1].nodes} == {"c", "d"}


def test_a_conviction_without_a_state_to_refuse_is_heard_late_too() -> None:
    """The liar goes, and what the others made since stays."""
    story = Story()
    story.tell(START + "> kill a\n> run 0.2")
    late(story, "b", -1)
    story.tell("> run 8\n> step 50\n> run 2")
    assert kept_out(story) == {"b"}
    assert [(one.cause, one.distrusted) for one in story.sealed[2:]] == [(Cause.LYING, ())]
    assert {node.name for node in story.sealed[2].nodes} == {"c", "d"}


def test_a_machine_that_is_admitted_again_is_not_kept_out_for_what_is_over() -> None:
    """What was said of the generation before is over: the record had it before this one was sealed without the node."""
    story = Story()
    story.tell(START + "> accuse b a c 30\n> lies b 30\n> run 8\n> step 50\n> run 1\n> release b\n> kill a\n> run 12")
    assert kept_out(story) == {"b"}
    assert sum(": quarantine b" in line for line in story.lines) == 1
    assert "b" in {node.name for node in story.sealed[-1].nodes}


BACK = Rollback(before=2, step=30, spike=40, first=300, stop=400)


def test_a_spike_ends_the_generation_at_once_and_what_it_leaves_out_stays() -> None:
    """Nobody waits for a death that explains it, and every generation that follows knows the hole."""
    story = Story()
    story.tell(START + "> spikes a b c 30\n> run 3\n> kill a\n> run 12")
    assert (story.sealed[1].cause, story.sealed[1].tries) == (Cause.SPIKE, 0)
    assert [generation.rollbacks for generation in story.sealed] == [(), *[(BACK,)] * (len(story.sealed) - 1)]
    assert [generation.distrusted for generation in story.sealed[1:]] == [(RULE,)] * (len(story.sealed) - 1)
    assert Cause.DEATH in {generation.cause for generation in story.sealed}
    assert all(decode(Generation, encode(one), "key") == one for one in story.sealed)


def test_one_node_that_says_so_is_enough() -> None:
    """Others may have lost it before they could; and the leader dies with the news in its hands."""
    story = Story()
    story.tell(START + "> kill a\n> spikes b 30\n> lost c\n> run 12")
    assert story.sealed[-1].cause is Cause.DEATH
    assert story.sealed[-1].rollbacks == (BACK,)
    assert story.sealed[-1].distrusted == (RULE,)


def test_the_next_job_under_the_id_knows_what_is_left_out() -> None:
    """It may begin from a state of before that does not say so."""
    story = Story()
    story.tell(START + "> spikes a b c 30\n> run 3")
    assert emptied(story.sealed[-1]).rollbacks == (BACK,)


def test_a_node_with_other_health_options_is_refused_by_their_names() -> None:
    """Ranks that decide by unlike rules would part at the first step that is not finite."""
    story = Story()
    story.tell("> policy minimum=2 maximum=4\n> start a b c\n> run 2\n> kill a\n> health x\n> run 3")
    refused = [line for line in story.lines if "refused this node" in line]
    assert refused
    assert "this node's health= says numerics=skip, that of the job" in refused[0]
    assert [node.name for node in story.sealed[-1].nodes] == ["b", "c"]


def test_a_node_that_is_put_out_before_it_could_speak_speaks_when_it_comes_back() -> None:
    """It is one of the two that were there; the other alone would not be believed."""
    story = Story()
    story.tell(FIVE + "> cut a\n> accuse b a c 30\n> kill b\n> run 20")
    assert kept_out(story) == set()
    assert "a" not in {node.name for node in story.sealed[-1].nodes}
    story.tell("> heal a\n> run 12\n> start b\n> run 12")
    assert kept_out(story) == {"b"}
    assert {node.name for node in story.sealed[-1].nodes} == {"a", "c", "d", "e"}
    assert any(rule.step == 30 for rule in story.sealed[-1].distrusted)
    assert all(core.report.goes_back == () for core in story.cores.values())


def test_a_node_that_is_put_out_before_it_could_say_that_it_lies_is_not_let_in_again() -> None:
    story = Story()
    story.tell(FIVE + "> cut b\n> lies b 30\n> run 20")
    assert kept_out(story) == set()
    story.tell("> heal b\n> run 12")
    assert kept_out(story) == {"b"}
    assert {node.name for node in story.sealed[-1].nodes} == {"a", "c", "d", "e"}


def test_two_incarnations_of_one_node_are_one_witness() -> None:
    """What the older one told is still there when the next one tells it, too."""
    story = Story()
    story.tell(FIVE + "> kill b\n> run 8")
    first = story.sealed[0]
    word = e.TrainerLostPeer(key=first.key, accused={node.id: node.place for node in first.nodes if node.name == "b"})
    story.to("c", word)
    story.tell("> run 1\n> vanish c\n> start c")
    story.to("c", word)
    story.tell("> run 20")
    assert kept_out(story) == set()


def test_a_convicted_machine_that_trains_again_under_another_id_has_to_go() -> None:
    """It came back before the others could tell, and no state is refused that would end the generation."""
    story = Story()
    story.tell(FIVE + "> kill b\n> run 8\n> start b\n> run 12\n> step 50\n> run 1")
    assert "b" in {node.name for node in story.sealed[-1].nodes}
    late(story, "b", -1)
    story.tell("> run 12")
    assert kept_out(story) == {"b"}
    assert story.sealed[-1].cause is Cause.LYING
    assert {node.name for node in story.sealed[-1].nodes} == {"a", "c", "d", "e"}
    assert list(story.sealed[-1].convicted.values()) == [1]
