"""The table of bugs that real jobs have shown: what happened, what went wrong, and the test that plays it again.

Nothing is taken out of it. What the simulation has found is in `chaos.simulation.bugs`, with a schedule each; the page
of the reference has both.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos.simulation import bugs


@dataclass(frozen=True, slots=True, kw_only=True)
class RealBug:
    """A fault that was found and mended. met: what happened to the job. wrong: what came of it.

    test: what fails without the mend, as `file::function`, or as the file of a story; below tests/.
    """

    met: str
    wrong: str
    test: str


def page() -> str:
    """Return both tables as a page of the reference."""
    lines = [
        "# Bugs found",
        "",
        "Faults of elastic3d that its own tests have found in real and in simulated jobs; all are mended. This page is",
        "written from the code by `make reference`.",
        "",
        "## In real jobs",
        "",
        "| what happened to the job | what went wrong | played again by |",
        "|---|---|---|",
        *(f"| {bug.met} | {bug.wrong} | `tests/{bug.test}` |" for bug in FOUND),
        "",
        "## In simulated jobs",
        "",
        "Two of them are of the simulation itself. Each schedule is the smallest that found its bug, and all are",
        "played again by `make test`; `elastic3d simulate membership --replay FILE` plays one from a file.",
        *bugs.sections(),
    ]
    return "\n".join(lines) + "\n"


FOUND: tuple[RealBug, ...] = (
    RealBug(
        met="etcd came back from a backup",
        wrong="a watch waited for revisions that had begun anew, and the next death hung the job",
        test="etcd/test_etcd_watch.py::test_a_watch_reports_an_etcd_that_comes_back_empty",
    ),
    RealBug(
        met="etcd was full while a lease ran out",
        wrong="the node could not register again, and was put out by whoever wrote first once there was space",
        test="testdata/membership/etcd-full.txt",
    ),
    RealBug(
        met="two of three etcd members died",
        wrong="members notice that seconds apart; the first ones took votes of the others for news from etcd, and "
        "stopped their trainers",
        test="testdata/membership/lost-etcd-noticed-late.txt",
    ),
    RealBug(
        met="a node joined while others came and went",
        wrong="an order to its heartbeat links was lost between two others, and it watched nobody",
        test="membership/driver/test_links.py::test_an_order_given_while_another_is_read_is_obeyed",
    ),
    RealBug(
        met="a node of a plain torchrun script hung",
        wrong="the others stood in torch's exit barrier for five minutes, and its timeout failed the job for all",
        test="rendezvous/test_restart.py::test_an_agent_that_hangs_does_not_hold_up_the_others",
    ),
    RealBug(
        met="the workers of an agent failed just after the next generation was prepared",
        wrong="it knew the answer of neither generation and said nothing, and all other agents waited for ever",
        test="rendezvous/test_closing.py::test_an_agent_that_gives_up_ends_the_job",
    ),
    RealBug(
        met="a template was killed on a busy machine",
        wrong="all nodes waited for up to 95 s until one of them had imported everything anew",
        test="worker/processes/test_faults.py::test_two_killed_templates_are_replaced_by_a_new_interpreter",
    ),
    RealBug(
        met="two asynchronous saves overlapped",
        wrong="they shared one step: tensors of the first were committed as the second, or one was lost",
        test="checkpointing/interchange/test_dcp_overlap.py::test_an_older_step_saved_after_a_newer_one_is_superseded",
    ),
    RealBug(
        met="ten answers of the object store had a flipped bit as the run came to its end",
        wrong="the last save waited for its next try, was dropped as soon as an older one was committed, and the job "
        "never ended",
        test="worker/checkpoints/test_committer.py::"
        "test_a_save_that_waits_for_its_next_try_is_committed_after_an_older_one",
    ),
    RealBug(
        met="a rank sent a tensor of another shape",
        wrong="gloo aborted whoever received it, and that node was blamed",
        test="histories/test_stuck.py::test_whoever_holds_the_job_up_is_named_and_the_bits_stay",
    ),
    RealBug(
        met="a device computed wrongly in the vote with which all ranks leave",
        wrong="nobody compared that vote, and the next generation took its state from the rank that was wrong",
        test="parallel/test_checking.py::test_what_goes_wrong_as_all_leave_is_not_handed_on",
    ),
    RealBug(
        met="rank 0 evaluated alone when the others had ended",
        wrong="a collective that nobody joined was taken for a lost peer: three tries, and no word of the reason",
        test="parallel/test_all_ranks.py::test_a_rank_whose_main_has_returned_is_not_waited_for",
    ),
    RealBug(
        met="the store's folder was away while a node came back",
        wrong="the node was refused for it and ended, though jobs that train go on without their store",
        test="admission/test_checks.py::test_a_store_that_is_away_for_a_moment_keeps_no_node_out",
    ),
    RealBug(
        met="a node's wall clock was an hour off when its cloud announced that it takes the machine",
        wrong="30 s of notice were taken for an hour, or for nothing",
        test="notices/test_azure.py::test_the_time_left_does_not_go_by_this_machines_clock",
    ),
    RealBug(
        met="the wall clocks of two nodes were hours apart",
        wrong="`elastic3d explain` made an old finding the newest, and named a later step as the first left out",
        test="cli/explain/test_pages.py::test_what_came_first_does_not_go_by_clocks",
    ),
    RealBug(
        met="a node was killed and started anew seconds before the job's end, while etcd did not answer",
        wrong="it read etcd only after the end, began the job anew, and waited for a second node until its timeout",
        test="membership/driver/test_member.py::"
        "test_a_node_that_reads_etcd_only_after_the_end_knows_that_it_was_started_before",
    ),
    RealBug(
        met="etcd was full as a node came, and the run's secret had been deleted by hand",
        wrong="the node ended at once, though it waits for an etcd that is away",
        test="trust/test_secret.py::test_a_node_that_starts_waits_for_an_etcd_that_takes_no_writes",
    ),
    RealBug(
        met="a node came while etcd's password was being changed",
        wrong="the node ended at once, though those that train wait for the new password",
        test="rendezvous/test_connect.py::test_a_password_that_is_being_changed_is_waited_for",
    ),
    RealBug(
        met="the record of what is committed was changed on its way to the store",
        wrong="nothing could be committed after it, and the job waited for its last checkpoint for ever",
        test="worker/checkpoints/test_committer.py::test_a_damaged_latest_is_written_anew",
    ),
    RealBug(
        met="a snapshot was damaged in one node's memory while the link to its copy lost packets",
        wrong="one reading of the copy timed out, and the script was said to have raised",
        test="training/test_state_loading.py::test_copies_that_cannot_be_reached_are_asked_for_again",
    ),
    RealBug(
        met="a snapshot was damaged before the first checkpoint, and held by nobody else",
        wrong="ranks that had read their own parts well went on from it while the others began at step 0: samples of "
        "another step, other bits, and a rank that left the program",
        test="training/test_falling_back.py::test_ranks_that_have_read_a_state_begin_again_with_one_that_finds_damage",
    ),
    RealBug(
        met="all copies of the newest steps were damaged before there was a checkpoint",
        wrong="the error that said so counted as one of the script's, and the next try passed over what was lost and "
        "began at step 0 without a word",
        test="parallel/test_state.py::test_a_state_that_is_lost_is_not_begun_anew_because_its_loss_was_an_error",
    ),
    RealBug(
        met="a process of a trainer's data loader was killed",
        wrong="the script was said to have raised, and the sockets of all loaders of that generation stayed in /tmp",
        test="worker/processes/test_faults.py::test_no_socket_of_a_loaders_process_is_left",
    ),
    RealBug(
        met="a template was stopped, and the job came to its end",
        wrong="nobody told that the trainer had ended, and the job waited for its node for ever",
        test="worker/processes/test_faults.py::test_a_trainer_that_ends_below_a_stopped_template_is_heard_of",
    ),
    RealBug(
        met="the code of a pipeline stage raised on every try",
        wrong="the job ended by `RuntimeError: ` and nothing more, torch's error around the script's",
        test="parallel/pipeline/test_pipeline.py::test_what_a_block_raises_is_told_as_it_is",
    ),
    RealBug(
        met="the only node's template was killed while the trainers of a join were prepared",
        wrong="that they had ended took the place of what it said of those that trained, and the job waited for these "
        "to leave for ever",
        test="testdata/membership/template-dies-while-preparing.txt",
    ),
    RealBug(
        met="one of two nodes was cut off for some seconds, and the layout asked for needed both",
        wrong="it came back and was not taken, since one node is allowed: the other waited for a second one for ever",
        test="testdata/membership/layout-needs-the-machine.txt",
    ),
    RealBug(
        met="a job in which each rank had a copy of the state for itself came to its first audited step",
        wrong="there was no group to ask what others had gathered, and every rank raised `KeyError`",
        test="parallel/test_auditing.py::test_audits_change_no_bit",
    ),
    RealBug(
        met="etcd was compacted while it was slow, and the answer was lost",
        wrong="the request was sent again, and that it was done already was an error",
        test="etcd/test_etcd_client.py::test_what_was_compacted_already_is_compacted",
    ),
    RealBug(
        met="rank 0 died before it told of a step of which another rank had a copy of the whole state",
        wrong="no event said that the step had been made, nor with which loss",
        test="worker/test_journal.py::test_a_state_says_the_loss_of_its_last_step",
    ),
    RealBug(
        met="a job went through 115 generations in 80 minutes",
        wrong="a keeper's threads left pieces of memory in sixteen arenas in turn, and it grew by 22 MB",
        test="worker/processes/test_arenas.py::test_threads_of_a_keeper_share_their_arenas",
    ),
)
