"""Finds the rank that holds everybody up, with evidence, from what every rank records of its own progress.

phases    what a trainer may be at, and the axes on which ranks wait for each other
waits     who waits for whom
stuck     what silent ranks say -> who holds the job up
evidence  what is kept of a rank before it is killed
digest    a digest of bits that adds up over any cut
audit     which steps are audited, and who replays whose micro-batch
hearing   who computed wrongly, when two ranks differ
"""
