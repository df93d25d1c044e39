"""What a user's `main` sees of a run, and where its state comes from.

run        the Run: shard, batches, restore, backward, step
loading    state into a built model, and out again
restoring  where the state comes from: a decision, made once for all ranks
state_facts  what a state says beside its tensors: written and read in one place
tiers      the places it may come from: keepers' memory, then the store
alone      the host of a script that is started by hand
begin      how a process goes through main
"""

from elastic3d.training.begin import Main, run_alone, train
from elastic3d.training.run import Run

__all__ = ["Run", "Main", "train", "run_alone"]
