"""The score card of health: real jobs that fail in known ways, and what the runtime made of each.

A trial is a job of torchrun agents in which one rank fails, at a step (`scripts/train_faulty.py`), or a control in
which nothing fails though it looks like it; several may share a job. The runtime has to name the right node, soon, end
with the bits of a job that nothing happened to, and do nothing at all in a control.

kinds     the rows: what a fault may be called, how soon, and whom a verdict has to name
trials    one job each, drawn from a seed
playing   a trial as a real job; series: several in one job; controls: jobs in which nothing fails, for minutes
results   what became of one, and whether it was named as it ought to be
reading   a result, from the events and marks that a job left
card      a row for each kind over all its trials, and the gates; shown: for people, and as one document
"""
