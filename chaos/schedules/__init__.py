"""Schedules: the faults that one job meets.

schedule      what one is, and whether its faults can happen to a job at all; sure: whether they surely do
files         TOML and JSON; scenario: the words of the demo's command line; as_test: a test that plays one
restart       what can happen to a script that torchrun restarts
draw          by seed
smaller       smaller ones than one that fails
"""
