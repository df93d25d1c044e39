"""Where a state comes from: the configuration, the code and the packages of the run that made it.

config    the configuration of a run: plain values, their digest, and what changed between two
code      the user's code in a folder: git's revision, the digest of changes to it, and files with theirs
packages  versions of the distributions that a process has imported
record    all of that as one value, which is part of each state's facts
compared  what nodes compare of it before they train together
"""
