"""What is to be said of a job that was played.

oracle        which promises it kept, by its own events and by an undisturbed run of the same seed
restart       the same of a script that torchrun restarts
explained     whether only that ended which the faults that were made may end
endings       whether what has to end ends, by an error that says why
promise       what a judge makes of one promise
notices       who noticed what was done to it, and how soon
"""
