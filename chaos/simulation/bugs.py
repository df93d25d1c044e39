"""The table of bugs: each fault of elastic3d that a schedule of the simulation has found, with that schedule.

Nothing is taken out of it. A schedule that is found and mended is added, minimised, and played again with each change;
what it came to is in the page of the reference that is made from it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from chaos.simulation.schedule import Schedule, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A fault that was found and mended. when: the circumstances, unlike all others'. wrong: what went wrong in them.

    text: the schedule, as `elastic3d simulate membership --replay` reads it.
    """

    when: str
    wrong: str
    text: str

    @property
    def schedule(self) -> Schedule:
        """What finds it."""
        return parse(self.text)


def _bug(when: str, wrong: str, text: str) -> Bug:
    return Bug(when=when, wrong=wrong, text=inspect.cleandoc(text))


def sections() -> list[str]:
    """Return lines of Markdown: a section for each."""
    lines = []
    for bug in FOUND:
        title = bug.when[0].upper() + bug.when[1:]
        lines += ["", f"### {title}", "", bug.wrong, "", "```", *bug.text.splitlines(), "```"]
    return lines


FOUND: tuple[Bug, ...] = (
    _bug(
        "a record that says, while nodes prepare, that a step is safe",
        "The simulation's trainers of one generation were parted in two groups by the step that had "
        "become safe meanwhile.",
        """
            job seed=1856 members=6 minimum=1 maximum=8 multiple_of=2 beside=1
            2.500 etcd-away for 2.2
            3.000 lie n6
            3.200 pause n1,n2,n3,n4 for 2.6
        """,
    ),
    _bug(
        "a member that begins to train after the others have",
        "The record says by then that a step was safe, which makes it no other generation.",
        """
            job seed=11892 members=5 minimum=2 maximum=8 multiple_of=1 beside=1
            2.058 isolate n3,n4 for 2.6
            2.806 mute n3 for 1.29
            5.925 kill leader
            5.931 quarantine n3 for 3.31
            6.146 kill n1
            6.160 etcd-away for 0.2
            6.702 revoke n3
        """,
    ),
    _bug(
        "an etcd that came back empty to one that slept",
        "The record was written again without the safe step, and was taken for another generation.",
        """
            job seed=1519 members=6 minimum=2 maximum=6 multiple_of=2 beside=1
            2.000 mute n4 for 0.5
            2.600 pause n1 for 6.6
            3.527 etcd-stop for 6.79
            3.532 fail leader
            3.544 vanish n5
            8.000 pause leader for 4.04
            12.200 etcd-empty for 0.63
        """,
    ),
    _bug(
        "an etcd that forgot the tombs of all others",
        "The member that buried them considered them buried, and waited for them for ever.",
        """
            job seed=1813 members=3 minimum=2 maximum=4 multiple_of=1 beside=1
            2.700 kill n2,n3
            3.300 etcd-restore for 0.5
            3.400 broken n4
        """,
    ),
    _bug(
        "an etcd that forgot a tomb",
        "Its tomb was lost with the rest, its member key came back, and both it and its successor were admitted.",
        """
            job seed=23 members=7 minimum=2 maximum=8 multiple_of=1 beside=0
            2.350 notice n6 for 3.85
            2.377 pause leader for 0.35
            3.239 pause n1 for 2.43
            3.250 pause n4 for 4.56
            3.275 isolate n2 for 0.15
            3.297 vanish n1
            6.121 deafen n6 for 2.93
            6.500 cut n7 for 7.18
            7.762 etcd-restore for 1.31
            8.230 notice n6 for 7.68
        """,
    ),
    _bug(
        "two leaders after an etcd that came back empty",
        "Both counted their attempts from the same number, and one's proposal had the key of what the other sealed.",
        """
            job seed=386 members=7 minimum=1 maximum=7 multiple_of=1 beside=1
            2.962 kill n7
            3.152 stick n7 for 4.12
            3.808 stick n6 for 24.03
            6.537 compact
            6.704 notice n5,n6,n7 for 3.22
            7.643 stick n4 for 13.97
            9.551 etcd-empty for 0.12
            10.742 start n2
            10.747 pause leader for 7.71
            11.406 lose n7 for 1.11
            11.412 compact
        """,
    ),
    _bug(
        "newcomers in an emptied etcd",
        "Nodes that came during an etcd outage led when etcd came back without data, and restarted the job.",
        """
            job seed=108 members=7 minimum=1 maximum=7 multiple_of=1 beside=1
            4.842 etcd-empty for 3.51
            7.367 start n4,n7
            7.456 start n8
        """,
    ),
    _bug(
        "a death while a lease is lost",
        "A death between a lost lease and its renewal evicted every node not registered at that moment.",
        """
            job seed=91 members=3 minimum=1 maximum=4 multiple_of=1 beside=1
            8.100 revoke n2
            8.600 kill n3
        """,
    ),
    _bug(
        "the word of one who is lost",
        "The isolated node called the others silent, and that counted against those without a lease.",
        """
            job seed=3672 members=5 minimum=2 maximum=5 multiple_of=1 beside=1
            9.300 etcd-stop for 5.8
            13.100 pause n3 for 6.7
            13.200 cut n2 for 6.3
        """,
    ),
    _bug(
        "the word of one whose neighbours died",
        "Its neighbours died, and that it did not hear them counted as their report against it.",
        """
            job seed=101817 members=7 minimum=1 maximum=6 multiple_of=1 beside=1
            2.100 vanish n3,n4,n6,n7
            4.700 drain n1 for 10.3
        """,
    ),
    _bug(
        "a lease lost before etcd went away",
        "The time of an etcd outage counted against members that had lost their lease before.",
        """
            job seed=19396 members=7 minimum=2 maximum=8 multiple_of=2 beside=1
            4.700 etcd-stop for 7.2
            13.600 etcd-away for 8
        """,
    ),
    _bug(
        "an answer behind a lost call",
        "Its answer to a question through etcd waited behind a call that etcd never answered.",
        """
            job seed=13810 members=3 minimum=3 maximum=4 multiple_of=1 beside=1
            3.600 cut n1 for 6
            8.600 start n4
            11.500 pause n3,n4 for 1.1
            11.900 etcd-stop for 0.3
            12.500 pause n2 for 0.2
            12.800 revoke n3
        """,
    ),
    _bug(
        "a lease lost while the others must leave",
        "All others were told to leave and went on for lack of anybody else; it had just lost its lease.",
        """
            job seed=26589 members=4 minimum=1 maximum=4 multiple_of=1 beside=1
            2.900 drain n1,n2,n3 for 7.6
            3.400 revoke n1,n3,n4
        """,
    ),
    _bug(
        "waiting for an orphan while etcd is away",
        "etcd was away while the job waited for it, the only node left of the generation, to register.",
        """
            job seed=40471 members=7 minimum=3 maximum=6 multiple_of=2 beside=0
            2.200 drain n6 for 5
            2.200 pause n4 for 7.6
            3.307 kill n1,n4,n5,n7
            3.311 etcd-stop for 4.3
            3.400 vanish n2
            8.200 start n1,n4,n5,n7
            8.400 etcd-away for 5
        """,
    ),
    _bug(
        "no incarnation is left",
        "A member joined under a name of which all earlier incarnations were out.",
        """
            job seed=3339 members=3 minimum=3 maximum=4 multiple_of=1 beside=1
            9.900 pause n3 for 0.3
            13.200 pause leader for 4.4
            16.600 pause leader for 3.4
            17.000 drain n2,n3,n4 for 10.1
        """,
    ),
    _bug(
        "registered again, and the leader's watch lags",
        "Its key stood again for seconds when the leader, whose watch lagged, buried it for being missing.",
        """
            job seed=92814 members=5 minimum=2 maximum=5 multiple_of=1 beside=1
            2.600 lose n4 for 0.5
            3.600 isolate n3,n4 for 4.5
            3.600 start n6
            8.600 etcd-slow for 4
            8.800 revoke n6
            12.200 lag leader for 3
        """,
    ),
    _bug(
        "those cut off stand side by side",
        "Three isolated nodes became neighbours, had not missed each other yet, and took themselves for the majority.",
        """
            job seed=95205 members=7 minimum=1 maximum=8 multiple_of=1 beside=1
            2.600 cut n2 for 6.7
            2.700 deafen n4,n5 for 5.8
            7.200 kill n6,n7
        """,
    ),
    _bug(
        "a majority of a moment",
        "While connections healed one by one, a wrong side was the larger one for some milliseconds.",
        """
            job seed=73810 members=5 minimum=1 maximum=8 multiple_of=1 beside=1
            2.600 start n7
            3.600 vanish n4
            11.600 cut n1,n2,n7 for 5.2
            12.700 start n4,n8
        """,
    ),
    _bug(
        "stopped while it registers",
        "It resumed to the end of its lease, and only then to the answer that it was registered: nobody admitted it.",
        """
            job seed=95753 members=3 minimum=2 maximum=4 multiple_of=1 beside=1
            6.206 start n4
            6.211 pause n4 for 5.2
        """,
    ),
    _bug(
        "stopped while it registers, and etcd is slow",
        "The same, with a lease under which etcd took long to write.",
        """
            job seed=98726 members=3 minimum=1 maximum=8 multiple_of=1 beside=1
            2.800 kill n3
            6.800 isolate leader for 4.7
            11.300 etcd-slow for 4.5
            15.200 pause n2 for 5.5
        """,
    ),
    _bug(
        "an answer as slow as the question",
        "The question took nearly two seconds to write, and the answer had only one.",
        """
            job seed=99037 members=2 minimum=1 maximum=4 multiple_of=1 beside=1
            2.700 pause leader for 2
            2.700 etcd-slow for 4.2
        """,
    ),
    _bug(
        "replaced, and then without a lease",
        "Its lease ended after its successor had registered, and then nobody knew that it had been replaced.",
        """
            job seed=70159 members=5 minimum=2 maximum=8 multiple_of=1 beside=1
            2.400 leave n3
            11.700 fail n2
            13.000 etcd-away for 0.7
            13.800 vanish n5
            14.700 start n5
            14.728 etcd-stop for 7.8
            15.200 kill leader
            17.626 unanswered n1,n5
        """,
    ),
    _bug(
        "asked, though it is heard",
        "It was heard all the time, but still asked; its answer waited behind another slow write.",
        """
            job seed=28732 members=2 minimum=1 maximum=4 multiple_of=1 beside=1
            2.100 etcd-slow for 4.4
            2.800 pause leader for 2
        """,
    ),
    _bug(
        "the only one that is registered",
        "All had lost their leases; the first to return was isolated, led, and its report alone counted "
        "against the others.",
        """
            job seed=99906 members=6 minimum=1 maximum=6 multiple_of=1 beside=1
            2.400 isolate leader for 0.3
            6.800 pause n3 for 0.2
            7.800 etcd-stop for 6.9
            7.800 mute n2 for 0.6
            12.400 start n7
            12.700 kill n6
            13.200 cut n2 for 2.8
        """,
    ),
    _bug(
        "leases revoked, and a leader that is deaf",
        "The same, with revoked leases.",
        """
            job seed=113300 members=4 minimum=2 maximum=5 multiple_of=1 beside=1
            3.500 etcd-elect for 1.4
            3.500 fail n3
            3.600 revoke n1,n2
            3.600 deafen n3 for 1.8
            4.100 revoke n4
        """,
    ),
    _bug(
        "the only node leaves",
        "It had no buddy to leave its snapshots with, and was gone before the newcomer could fetch them.",
        """
            job seed=1 members=1 minimum=1 maximum=4 multiple_of=1 beside=1
            3.000 start n2
            3.100 drain n1 for 20
        """,
    ),
    _bug(
        "what a conviction takes back is not reached again",
        "Reports of steps that a convicted device took part in count as reached again after they were distrusted.",
        """
            job seed=119 members=5 minimum=2 maximum=8 multiple_of=1 beside=1
            2.578 lie n4
        """,
    ),
    _bug(
        "a leader dies as it leaves out who computes wrongly",
        "It was put into quarantine once the next generation was sealed, by a leader that was dead by then.",
        """
            job seed=1 members=5 minimum=2 maximum=4
            4.059 lie n2
            4.069 kill leader
        """,
    ),
    _bug(
        "a leader dies as somebody computes wrongly",
        "The death of the leader was seen first, and the next generation formed for that alone.",
        """
            job seed=13 members=6 minimum=2 maximum=7
            3.148 lie n2
            3.148 kill leader
        """,
    ),
    _bug(
        "a step is made again after an audit of it",
        "The simulated store vetted a step that was made again by what its first generation had audited.",
        """
            job seed=643 members=3 minimum=1 maximum=4 multiple_of=1 beside=0
            2.200 pause leader for 1.4
            3.000 kill n1
            3.000 deafen n2 for 7.2
            21.200 sticks n2 for 16.7
            21.500 fail n3
            24.800 isolate n3 for 7.7
        """,
    ),
    _bug(
        "two deaths before a conviction is heard",
        "Words counted in the generation after their own and no later: the run went on with the convicted device, from "
        "what it had made.",
        """
            job seed=1 members=4 minimum=2 maximum=4
            2.600 lie n2 for 0.7
            2.650 kill n3
            2.720 kill n4
        """,
    ),
    _bug(
        "a node stands still after another one was put out for its errors",
        "The tries that the other one had used up counted against it, and the job ended at its first stand-still.",
        """
            job seed=751 members=7 minimum=1 maximum=7 multiple_of=1 beside=1
            2.200 spike n7
            2.400 broken n8
            2.600 kill n1,n2,n6
            2.600 revoke n4
            2.700 sticks n3 for 20.7
        """,
    ),
    _bug(
        "the layout asked for needs more nodes than the job does",
        "A node that came back to its machine was not taken: the others were enough by the policy, and no layout "
        "fitted them. The job waited beside it, and failed in the end.",
        """
            job seed=1 members=2 minimum=1 maximum=4 multiple_of=1 beside=1 pp=2
            3.000 kill n2
            4.000 start n2
        """,
    ),
    _bug(
        "a node stands still twice after the run has gone back a long way",
        "Steps were no progress as long as the run had been further before: the job ended at its second stand-still as "
        "if it had made none in between.",
        """
            job seed=200277 members=6 minimum=2 maximum=8 multiple_of=1 beside=1
            2.900 quarantine n1,n4 for 5.2
            3.000 lie leader
            7.600 kill n2,n4,n5,n6
            14.200 sticks n3 for 21.7
        """,
    ),
    _bug(
        "an operator keeps a convicted machine out for a short time",
        "The order took the place of the day for which its conviction kept it out: the machine trained again, in the "
        "generation that was formed because of it.",
        """
            job seed=500673 members=6 minimum=3 maximum=8 multiple_of=2 beside=1
            2.100 lie n1 for 0.1
            3.500 quarantine n1 for 5.1
        """,
    ),
    _bug(
        "etcd comes back from a backup while too few nodes for a layout are left",
        "It knew nothing of the node that was out, for which the others had stopped their trainers: who came back "
        "trained in their generation, nobody formed another, and the job stood still.",
        """
            job seed=302736 members=7 minimum=2 maximum=8 multiple_of=2 beside=1 pp=3
            1.980 slow n1 for 19.99
            2.181 isolate n2,n3,n5,n7 for 6.08
            5.692 pause n7 for 0.7
            5.718 cut n4 for 2
            7.566 etcd-restore for 3.4
            8.200 error n7
            8.230 isolate n7 for 4.14
            8.255 cut n7 for 4.91
        """,
    ),
    _bug(
        "etcd goes away again soon after it came back from a backup in which a node leads that is dead",
        "The time without etcd counted against whoever waited to write the generation again, before the dead leader's "
        "key was gone: all that were left began anew, and nobody knew which step was safe.",
        """
            job seed=200036 members=5 minimum=1 maximum=5 multiple_of=1 beside=1
            3.700 vanish n1,n3,n5
            4.500 etcd-restore for 4.8
            12.100 etcd-stop for 5.6
        """,
    ),
    _bug(
        "etcd comes back from a backup that knows a former incarnation of a node",
        "The one that lived had not registered there again, and was put out for the former one, which had ended long "
        "ago: its process ended for good.",
        """
            job seed=500963 members=6 minimum=1 maximum=6 multiple_of=1 beside=1 pp=2
            2.200 cut n2 for 2
            6.300 start n7
            6.319 etcd-restore for 0.6
        """,
    ),
    _bug(
        "the trainers of a node leave before it has heard for which membership",
        "The others had asked first, and its news was late. It reported that its trainers had left once their last "
        "step was held where it always is, by a node that left as well: the change was planned, and cost all steps.",
        """
            job seed=700140 members=5 minimum=1 maximum=5 multiple_of=2 beside=1
            2.800 lag n3 for 7
            4.000 etcd-away for 0.4
            4.000 notice n3,n4,n5 for 8.2
        """,
    ),
)
