"""Finds the rank that holds everybody up, and the device that computes wrongly, with evidence.

options      Health: what a script says about all this
phases       what a trainer may be at, and the axes on which ranks wait for each other
record       the page in which a trainer records what it is at: writer and reader
stacks       the stacks of a trainer's threads; processes: what the kernel says of its processes
deadlines    how long a rank may be silent
watch        a keeper's watch of its slot's trainers
waits        who waits for whom
stuck        what silent ranks say -> who holds the job up
evidence     what is kept of a rank before it is killed
explanation  what a person reads of it afterwards
digest       a digest of bits that adds up over any cut
audit        which steps are audited, and who replays whose micro-batch
hearing      who computed wrongly, when two ranks differ
numerics     what follows from a step's numbers
"""
