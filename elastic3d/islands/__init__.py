"""Training over islands: jobs of elastic3d that train apart, and merge what they learned every so many steps.

Each island is a job of its own: its nodes, generations, snapshots and checkpoints, and an ordered reduction. What one
island knows of the others is in one object store, and in it alone. After every H steps each island writes how far its
parameters have moved since the last outer step (its delta); one of them seals which deltas are merged, in a record that
only one can create; and all take the same outer step: the parameters of all islands are the same bits then.

options    what a script asks for
record     what the store holds of the islands, and how an outer step is sealed: pure functions
exchange   the objects of the store
folder     a part of a store
fragments  which parameters are merged together
outer      the outer optimizer, as arithmetic on one rank's part
state      its state, kept with the run's
tensors    deltas and outer parameters, written and read by all ranks
sealing    how an outer step comes to be sealed
background an outer step's exchange while inner steps go on
meeting    what the ranks of an island do together: errors, waits and retries
setup      what islands must have in common
member     one island: how it begins, merges, and is left behind
replay     an island's part of the record, trained once more
"""

from elastic3d.islands.options import Islands

__all__ = ["Islands"]
