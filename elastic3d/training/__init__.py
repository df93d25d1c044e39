"""The run as a user's `main` sees it, and where its state comes from.

run          the Run: shard, batches, restore, backward, step
scalars      what scripts log of a step, and their wish to end the run
evaluated    a checkpoint's model in a run that only evaluates
evaluating   a metric of a data set, by forward passes alone
peers        its device and process groups, and what follows when a peer is lost
auditing     steps whose micro-batches other ranks repeat
redoing      steps whose numbers are not finite, made again without what they come from
loading      state into a built model, and out again
restoring    where the state comes from: a decision, made once for all ranks
state_facts  what a state says beside its tensors: written and read in one place
tiers        the places it may come from: keepers' memory, then the store
standalone   the host of a script that is started by hand
begin        how a process runs main
"""

from elastic3d.training.begin import Main, run_alone, train
from elastic3d.training.run import Run

__all__ = ["Run", "Main", "train", "run_alone"]
