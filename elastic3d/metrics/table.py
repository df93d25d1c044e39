"""Every metric: its name, kind, labels, meaning, and the events that it is counted from. All else is made from this.

Names follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): base units, spelled out at the end
of the name, `_total` for what only grows. Every sample carries the labels `run` and `node`; what others a metric has,
and all their values, stands here: `OTHER` takes the place of a value that does not, so that the number of series of a
node is bounded whatever happens to it. Counters are there from the beginning, at 0 for all values of their labels:
`increase()` sees their first growth.

A counter is counted by one node only, where all hear of the same thing: the sum over a job's nodes is right.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic3d.accounting.spans import Category
from elastic3d.health.hearing import Finding
from elastic3d.health.sheet import StepSheet
from elastic3d.metrics.metric import OTHER, Label, Metric, MetricKind, Rule, Source, Teller
from elastic3d.values import Cause

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of steps and of writes."""

LONG_SECONDS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets of recoveries."""

PHASES = tuple(name for name in StepSheet.__slots__ if name not in ("work", "rounds", "block", "read"))
"""What a step's seconds go into, as `health.sheet.StepSheet` has them."""

NOTICE, SEAL, RESTORE, FIRST_STEP = "notice", "seal", "restore", "first_step"
RECOVERY_PHASES = (NOTICE, SEAL, RESTORE, FIRST_STEP)
LOSS, PLANNED = "loss", "planned"
CLEAN = "clean"
"""The outcome of an audit in which all agreed."""

_G, _C, _H, _S = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM, MetricKind.SUMMARY

_CAUSE = Label(name="cause", values=(*Cause, OTHER))
_PHASE = Label(name="phase", values=PHASES)
_RECOVERY_PHASE = Label(name="phase", values=RECOVERY_PHASES)
_RECOVERY = Label(name="kind", values=(LOSS, PLANNED))
_AXIS = Label(name="axis", values=("pp", "dp", "cp", "tp"))
_NODE_STATE = Label(name="state", values=("active", "spare", "draining"))
_MEMBERS = Label(name="state", values=("active", "spare"))
_SOURCE = Label(name="source", values=("none", "memory", "store", OTHER))
_REF = Label(name="ref", values=("latest", "verified", "vetted"))
_EXIT = Label(
    name="kind",
    values=(
        "done",
        "left",
        "measured",
        "peer_lost",
        "error",
        "out_of_memory",
        "convicted",
        "stopped",
        "crash",
        "template",
        OTHER,
    ),
)
_VERDICT = Label(
    name="kind",
    values=("stuck", "stalled", "slow", "lying", "altered", "vote_split", "update_wrong", "unfit", "memory"),
)
_AUDIT = Label(
    name="outcome",
    values=(CLEAN, *Finding, "inconclusive", OTHER),
)
_EXAM = Label(name="outcome", values=("passed", "failed", "none"))
_PROCESS = Label(name="process", values=("keeper", "trainer"))
_CATEGORY = Label(name="category", values=tuple(Category))
_SIGNAL = Label(name="signal", values=("traces", "metrics"))
_MEMORY = Label(name="kind", values=("anonymous", "file", "shared"))

_LIST: tuple[Metric, ...] = (
    # The keeper itself.
    Metric(
        name="elastic3d_info",
        kind=_G,
        source=Source.NODE,
        help="1; the label says which elastic3d runs here.",
        # A single value, which the keeper knows.
        labels=(Label(name="version", values=()),),
    ),
    Metric(
        name="elastic3d_node_state",
        kind=_G,
        source=Source.NODE,
        help="1 for what this node is, 0 for the others.",
        labels=(_NODE_STATE,),
    ),
    Metric(
        name="elastic3d_node_healthy",
        kind=_G,
        source=Source.NODE,
        help="0 where `elastic3d status` says that something is wrong here, else 1.",
    ),
    # Steps.
    Metric(
        name="elastic3d_step",
        kind=_G,
        source=Source.FIRST,
        help="Updates made, the newest step's included.",
        rules=(Rule(event="step.committed", amount="step"),),
    ),
    Metric(
        name="elastic3d_target_step",
        kind=_G,
        source=Source.FIRST,
        help="The step up to which the script trains, where it says so.",
        rules=(Rule(event="training.progress", amount="until", least=1.0),),
    ),
    Metric(
        name="elastic3d_loss",
        kind=_G,
        source=Source.FIRST,
        help="The newest step's loss.",
        rules=(Rule(event="step.committed", amount="loss"),),
    ),
    Metric(
        name="elastic3d_gradient_norm",
        kind=_G,
        source=Source.FIRST,
        help="The newest step's gradient norm before clipping; none where the script clips nothing.",
        rules=(Rule(event="step.committed", amount="gradient_norm"),),
    ),
    Metric(
        name="elastic3d_noise_scale",
        kind=_G,
        source=Source.FIRST,
        help="The gradient's noise scale in samples; none where the global batch does not follow it, or it is lost.",
        rules=(Rule(event="step.committed", amount="noise_scale"),),
    ),
    Metric(
        name="elastic3d_steps_total",
        kind=_C,
        source=Source.FIRST,
        help="Steps made, those that were made again included.",
        rules=(Rule(event="step.committed"),),
    ),
    Metric(
        name="elastic3d_steps_repeated_total",
        kind=_C,
        source=Source.FIRST,
        help="Steps made again, as far as this node saw them the first time.",
    ),
    Metric(
        name="elastic3d_samples_total",
        kind=_C,
        source=Source.FIRST,
        help="Samples that steps consumed, without those that were left out.",
    ),
    Metric(
        name="elastic3d_tokens_total",
        kind=_C,
        source=Source.FIRST,
        help="Tokens of these samples, where the data set says how many each has (`sample_tokens`); else 0.",
        rules=(Rule(event="step.committed", amount="tokens"),),
    ),
    Metric(
        name="elastic3d_model_flops_total",
        kind=_C,
        source=Source.FIRST,
        help="Floating-point operations that the model takes for these samples, forward and backward, without what is "
        "computed again; 0 where they could not be counted, as event `model.measured` says.",
    ),
    Metric(
        name="elastic3d_node_peak_flops_per_second",
        kind=_G,
        source=Source.NODE,
        help="Operations a second that the devices which train on this node could make, by their data sheet, in the "
        "number format of the run's products; none where no sheet is known, as of CPUs, or this node does not train.",
    ),
    Metric(
        name="elastic3d_gradient_sent_bytes_total",
        kind=_C,
        source=Source.FIRST,
        help="Bytes of gradients that all ranks together sent to ranks of other nodes, by the layout and the ordered "
        "reduction; 0 where event `reduction.planned` says why they are not known.",
    ),
    Metric(
        name="elastic3d_samples_excluded_total",
        kind=_C,
        source=Source.FIRST,
        help="Samples that were left out of steps.",
    ),
    Metric(
        name="elastic3d_step_duration_seconds",
        kind=_H,
        source=Source.FIRST,
        help="How long steps took on rank 0.",
        rules=(Rule(event="step.committed", amount="seconds"),),
        buckets=SECONDS,
    ),
    Metric(
        name="elastic3d_step_processor_seconds_total",
        kind=_C,
        source=Source.FIRST,
        help="Processor time that rank 0 used for steps.",
        rules=(Rule(event="step.committed", amount="processor"),),
    ),
    Metric(
        name="elastic3d_data_read_bytes_total",
        kind=_C,
        source=Source.FIRST,
        help="Bytes from object storage that rank 0's samples were made of, as `elastic3d.Remote` reads them.",
        rules=(Rule(event="step.committed", amount="read"),),
    ),
    Metric(
        name="elastic3d_step_phase_seconds",
        kind=_G,
        source=Source.NODE,
        help="What a step's time goes into on this node's first rank: means over eight steps, known eight steps later.",
        labels=(_PHASE,),
    ),
    Metric(
        name="elastic3d_step_read_bytes",
        kind=_G,
        source=Source.NODE,
        help="Bytes from object storage that a step's samples of this node's first rank were made of, as "
        "`elastic3d.Remote` reads them: means over eight steps, known eight steps later.",
    ),
    Metric(
        name="elastic3d_nonfinite_losses_total",
        kind=_C,
        source=Source.FIRST,
        help="Times that the loss became not finite.",
        rules=(Rule(event="loss.nonfinite"),),
    ),
    Metric(
        name="elastic3d_loss_spikes_total",
        kind=_C,
        source=Source.FIRST,
        help="Times that the loss jumped up and stayed there.",
        rules=(Rule(event="loss.spiked"),),
    ),
    Metric(
        name="elastic3d_rollbacks_total",
        kind=_C,
        source=Source.FIRST,
        help="Times that the run went back because the loss had jumped up.",
        rules=(Rule(event="run.rolled_back", teller=Teller.RANK_0),),
    ),
    # Membership.
    Metric(
        name="elastic3d_generation",
        kind=_G,
        source=Source.ALL,
        help="Number of the newest sealed generation.",
        rules=(Rule(event="generation.sealed", amount="number"),),
    ),
    Metric(
        name="elastic3d_generations_total",
        kind=_C,
        source=Source.LEADER,
        help="Generations sealed, by why they were formed.",
        labels=(_CAUSE,),
        rules=(Rule(event="generation.sealed", labels=("$cause",), teller=Teller.LEADER),),
    ),
    Metric(
        name="elastic3d_nodes",
        kind=_G,
        source=Source.ALL,
        help="Nodes of the newest sealed generation.",
        labels=(_MEMBERS,),
        rules=(
            Rule(event="generation.sealed", amount="nodes", labels=("active",)),
            Rule(event="generation.sealed", amount="spares", labels=("spare",)),
        ),
    ),
    Metric(
        name="elastic3d_nodes_awaited",
        kind=_G,
        source=Source.LEADER,
        help="Nodes that the job waits for, since fewer are there than it may train with.",
    ),
    Metric(
        name="elastic3d_layout_size",
        kind=_G,
        source=Source.ALL,
        help="Sizes of the mesh's axes.",
        labels=(_AXIS,),
    ),
    Metric(
        name="elastic3d_peers_lost_total",
        kind=_C,
        source=Source.NODE,
        help="Neighbours whose end this node noticed; their other neighbours count them as well.",
        rules=(Rule(event="peer.lost"),),
    ),
    Metric(
        name="elastic3d_peers_unreachable",
        kind=_G,
        source=Source.NODE,
        help="Nodes that this one cannot connect to.",
    ),
    Metric(
        name="elastic3d_fenced_total",
        kind=_C,
        source=Source.NODE,
        help="Times that the others put this node out, and it came back as a newcomer.",
        rules=(Rule(event="member.fenced"),),
    ),
    Metric(
        name="elastic3d_drains_total",
        kind=_C,
        source=Source.NODE,
        help="Times that this node was asked to leave in order.",
        rules=(Rule(event="node.draining"),),
    ),
    Metric(
        name="elastic3d_goodput_seconds_total",
        kind=_C,
        source=Source.LEADER,
        help="Node-seconds that this node accounted for while it led, by what they went to; what is useful does not "
        "grow while lost steps are made again.",
        labels=(_CATEGORY,),
    ),
    # Recovery.
    Metric(
        name="elastic3d_recovery_duration_seconds",
        kind=_H,
        source=Source.FIRST,
        help="From the last step of a generation to the end of the first one of the next, after a loss or a planned "
        "change, as far as this node trained in both.",
        labels=(_RECOVERY,),
        buckets=LONG_SECONDS,
    ),
    Metric(
        name="elastic3d_recovery_phase_seconds_total",
        kind=_C,
        source=Source.FIRST,
        help="The same by phase: until something was noticed, until the generation was sealed, until its state was "
        "restored, until its first step was made.",
        labels=(_RECOVERY, _RECOVERY_PHASE),
    ),
    Metric(
        name="elastic3d_restores_total",
        kind=_C,
        source=Source.FIRST,
        help="Beginnings of generations, by where their state came from.",
        labels=(_SOURCE,),
        rules=(Rule(event="state.restored", labels=("$source",), teller=Teller.RANK_0),),
    ),
    Metric(
        name="elastic3d_trainer_exits_total",
        kind=_C,
        source=Source.NODE,
        help="Trainers of this node that ended, by how.",
        labels=(_EXIT,),
        rules=(Rule(event="trainer.exited", labels=("$kind",)),),
    ),
    Metric(
        name="elastic3d_script_errors_total",
        kind=_C,
        source=Source.NODE,
        help="Exceptions of the script on this node, without those for want of memory.",
        rules=(Rule(event="script.raised"),),
    ),
    Metric(
        name="elastic3d_memory_exhausted_total",
        kind=_C,
        source=Source.NODE,
        help="Times that memory ran out on this node.",
        rules=(Rule(event="memory.exhausted"),),
    ),
    # Snapshots in memory.
    Metric(
        name="elastic3d_safe_step",
        kind=_G,
        source=Source.FIRST,
        help="The newest step that every rank holds twice: where a death would go back to.",
        rules=(Rule(event="step.committed", amount="safe_step", least=0.0),),
    ),
    Metric(
        name="elastic3d_snapshot_sent_bytes_total",
        kind=_C,
        source=Source.NODE,
        help="Bytes of snapshots that this node has sent to the one that keeps its copies, as far as they arrived.",
        rules=(Rule(event="snapshot.held", amount="sent"),),
    ),
    Metric(
        name="elastic3d_snapshot_age_seconds",
        kind=_G,
        source=Source.ALL,
        help="Age of the safe step, as far as this node saw it made.",
    ),
    Metric(
        name="elastic3d_snapshot_interval_steps",
        kind=_G,
        source=Source.ALL,
        help="Steps from one snapshot to the next, 0 for none.",
    ),
    Metric(
        name="elastic3d_snapshot_stale",
        kind=_G,
        source=Source.NODE,
        help="1 where the safe step is older than stale_after or stale_snapshots allow, and this node is a reason or "
        "holds rank 0.",
        rules=(
            Rule(event="snapshot.stale", value=1.0),
            Rule(event="snapshot.fresh", value=0.0),
            Rule(event="generation.sealed", value=0.0),
        ),
    ),
    Metric(
        name="elastic3d_snapshots_held_total",
        kind=_C,
        source=Source.NODE,
        help="Snapshots of this node's ranks that were held twice, each rank's for itself.",
        rules=(Rule(event="snapshot.held"),),
    ),
    Metric(
        name="elastic3d_buddy_changes_total",
        kind=_C,
        source=Source.NODE,
        help="Times that snapshots went to another node because the one before did not take them.",
        rules=(Rule(event="buddy.changed"),),
    ),
    # Checkpoints.
    Metric(
        name="elastic3d_checkpoint_step",
        kind=_G,
        source=Source.LEADER,
        help="Step of the newest checkpoint, of the newest that was read back, and of the newest that audits vouch "
        "for.",
        labels=(_REF,),
    ),
    Metric(
        name="elastic3d_checkpoint_age_seconds",
        kind=_G,
        source=Source.LEADER,
        help="Seconds since these were made; a node that no longer leads shows them growing older: take the least.",
        labels=(_REF,),
    ),
    Metric(
        name="elastic3d_checkpoints_total",
        kind=_C,
        source=Source.LEADER,
        help="Checkpoints committed.",
        rules=(Rule(event="checkpoint.committed", where="moved"),),
    ),
    Metric(
        name="elastic3d_checkpoint_failures_total",
        kind=_C,
        source=Source.NODE,
        help="Writes and commits of this node that failed. Training goes on.",
        rules=(Rule(event="checkpoint.failed"),),
    ),
    Metric(
        name="elastic3d_checkpoint_failing",
        kind=_G,
        source=Source.NODE,
        help="1 since a write or a commit of this node failed, until one works again.",
        rules=(
            Rule(event="checkpoint.failed", value=1.0),
            Rule(event="checkpoint.mended", value=0.0),
        ),
    ),
    Metric(
        name="elastic3d_checkpoint_tile_bytes_total",
        kind=_C,
        source=Source.NODE,
        help="Bytes of the tiles of this node's checkpoints, whether they had to be written or not.",
        rules=(Rule(event="checkpoint.written", amount="bytes"),),
    ),
    Metric(
        name="elastic3d_checkpoint_written_bytes_total",
        kind=_C,
        source=Source.NODE,
        help="Bytes of those of them that had to be written.",
        rules=(Rule(event="checkpoint.written", amount="new"),),
    ),
    Metric(
        name="elastic3d_checkpoint_write_seconds",
        kind=_H,
        source=Source.NODE,
        help="How long a slot's part of a checkpoint took to write; training goes on meanwhile.",
        rules=(Rule(event="checkpoint.written", amount="seconds"),),
        buckets=SECONDS,
    ),
    Metric(
        name="elastic3d_checkpoint_verify_seconds",
        kind=_S,
        source=Source.LEADER,
        help="How long checkpoints took to be read back.",
        rules=(Rule(event="checkpoint.verified", amount="seconds"),),
    ),
    Metric(
        name="elastic3d_checkpoints_unverified_total",
        kind=_C,
        source=Source.LEADER,
        help="Checkpoints that could not be read back as they were written.",
        rules=(Rule(event="checkpoint.unverified"),),
    ),
    Metric(
        name="elastic3d_store_waits_total",
        kind=_C,
        source=Source.NODE,
        help="Times that a busy or absent store was waited for, at most one each half minute.",
        rules=(Rule(event="store.waiting"),),
    ),
    Metric(
        name="elastic3d_store_over_limit_bytes",
        kind=_G,
        source=Source.LEADER,
        help="Bytes by which checkpoints that must be kept exceed keep_bytes.",
        rules=(
            Rule(event="store.limit_exceeded", amount="over"),
            Rule(event="store.limit_kept", value=0.0),
        ),
    ),
    Metric(
        name="elastic3d_store_collected_bytes_total",
        kind=_C,
        source=Source.LEADER,
        help="Bytes of objects in the store that retention deleted.",
        rules=(Rule(event="checkpoint.collected", amount="bytes"),),
    ),
    # Health.
    Metric(
        name="elastic3d_verdicts_total",
        kind=_C,
        source=Source.FIRST,
        help="What was concluded of ranks and nodes; `stuck`, `stalled` and `memory` by the node that leads, `altered` "
        "by the node whose state it is.",
        labels=(_VERDICT,),
        rules=(
            Rule(event="rank.stuck", labels=("stuck",)),
            Rule(event="training.stalled", labels=("stalled",)),
            Rule(event="memory.short", labels=("memory",)),
            Rule(event="node.slow", labels=("slow",)),
            Rule(event="node.lying", labels=("lying",), teller=Teller.RANK_0),
            Rule(event="state.altered", labels=("altered",)),
            Rule(event="vote.split", labels=("vote_split",), teller=Teller.RANK_0),
            Rule(event="update.wrong", labels=("update_wrong",), teller=Teller.RANK_0),
            Rule(event="exam.failed", labels=("unfit",), teller=Teller.RANK_0),
        ),
    ),
    Metric(
        name="elastic3d_audits_total",
        kind=_C,
        source=Source.FIRST,
        help="Audits by outcome: `clean` where all agreed, else what a hearing found where two ranks differed.",
        labels=(_AUDIT,),
        rules=(
            Rule(event="audit.failed", labels=("$finding",), teller=Teller.RANK_0),
            Rule(event="audit.inconclusive", labels=("inconclusive",), teller=Teller.RANK_0),
        ),
    ),
    Metric(
        name="elastic3d_audited_step",
        kind=_G,
        source=Source.ALL,
        help="The newest step that audits vouch for.",
    ),
    Metric(
        name="elastic3d_exams_total",
        kind=_C,
        source=Source.FIRST,
        help="Exams of newcomers before the first step of a generation, by outcome; `none`: nobody could ask them.",
        labels=(_EXAM,),
        rules=(
            Rule(event="node.examined", labels=("passed",), teller=Teller.RANK_0),
            Rule(event="exam.failed", labels=("failed",), teller=Teller.RANK_0),
            Rule(event="node.unexamined", labels=("none",), teller=Teller.RANK_0),
        ),
    ),
    Metric(
        name="elastic3d_steps_redone_total",
        kind=_C,
        source=Source.FIRST,
        help="Steps whose passes were made again before their update.",
        rules=(Rule(event="step.redone", teller=Teller.RANK_0),),
    ),
    Metric(
        name="elastic3d_ranks_suspected_total",
        kind=_C,
        source=Source.NODE,
        help="Ranks of this node that made no progress and waited for no other.",
        rules=(Rule(event="rank.suspected"),),
    ),
    Metric(
        name="elastic3d_slow_nodes",
        kind=_G,
        source=Source.ALL,
        help="Nodes that are slow, as this one finds; none where nobody measures.",
    ),
    Metric(
        name="elastic3d_node_slowness_ratio",
        kind=_G,
        source=Source.NODE,
        help="How many times as long as others this node takes for the same work; 1 where it is not slow.",
    ),
    # etcd.
    Metric(
        name="elastic3d_etcd_up",
        kind=_G,
        source=Source.NODE,
        help="0 while etcd does not answer this node, else 1.",
        rules=(Rule(event="etcd.lost", value=0.0), Rule(event="etcd.back", value=1.0)),
    ),
    Metric(
        name="elastic3d_etcd_writable",
        kind=_G,
        source=Source.NODE,
        help="0 while etcd takes no writes from this node, until somebody mends what event `etcd.impaired` says, else "
        "1.",
        rules=(Rule(event="etcd.impaired", value=0.0), Rule(event="etcd.mended", value=1.0)),
    ),
    Metric(
        name="elastic3d_etcd_outages_total",
        kind=_C,
        source=Source.NODE,
        help="Times that etcd stopped answering.",
        rules=(Rule(event="etcd.lost"),),
    ),
    Metric(
        name="elastic3d_etcd_outage_seconds_total",
        kind=_C,
        source=Source.NODE,
        help="How long it did not answer, counted when it does again.",
        rules=(Rule(event="etcd.back", amount="seconds"),),
    ),
    Metric(
        name="elastic3d_etcd_answer_seconds",
        kind=_S,
        source=Source.NODE,
        help="How long etcd took to answer this node's requests and keepalives.",
    ),
    Metric(
        name="elastic3d_etcd_failed_tries_total",
        kind=_C,
        source=Source.NODE,
        help="Requests to one of etcd's members that got no answer; another one is asked then.",
    ),
    # Processes.
    Metric(
        name="elastic3d_memory_bytes",
        kind=_G,
        source=Source.NODE,
        help="Resident memory of this node's keepers and trainers, as /proc/<pid>/status has it. Anonymous memory is a "
        "process's own, and may be added up; files and shared memory, snapshots among it, may be counted in several.",
        labels=(_PROCESS, _MEMORY),
    ),
    Metric(
        name="elastic3d_processes",
        kind=_G,
        source=Source.NODE,
        help="Keepers and trainers of this node that these are of.",
        labels=(_PROCESS,),
    ),
    Metric(
        name="elastic3d_thread_failures_total",
        kind=_C,
        source=Source.NODE,
        help="Exceptions that reached the edge of a background thread of the keeper: bugs of elastic3d.",
        rules=(Rule(event="thread.failed"),),
    ),
    Metric(
        name="elastic3d_connections_refused_total",
        kind=_C,
        source=Source.NODE,
        help="Callers that were turned away at this node's ports.",
    ),
    Metric(
        name="elastic3d_events_dropped_total",
        kind=_C,
        source=Source.NODE,
        help="Events that were not written, because the disk was too slow for them.",
        rules=(Rule(event="events.dropped", amount="count"),),
    ),
    Metric(
        name="elastic3d_telemetry_failures_total",
        kind=_C,
        source=Source.NODE,
        help="Exports of `telemetry=` that no collector took, tries of the same spans included.",
        labels=(_SIGNAL,),
    ),
    Metric(
        name="elastic3d_telemetry_spans_lost_total",
        kind=_C,
        source=Source.NODE,
        help="Spans that no collector has, and none will: they were refused, or too many were waiting.",
    ),
    Metric(
        name="elastic3d_metrics_failures_total",
        kind=_C,
        source=Source.NODE,
        help="Events and parts of scrapes that could not be counted or read: bugs of elastic3d.",
    ),
)

METRICS = MappingProxyType({metric.name: metric for metric in _LIST})
"""All metrics by name, in the order in which they are served."""
