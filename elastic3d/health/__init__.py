"""Finds the rank that holds everybody up, with evidence, from what every rank records of its own progress.

phases    what a trainer may be at, and the axes on which ranks wait for each other
"""
