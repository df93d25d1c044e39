"""Schedules on jobs of anybody's script.

storm         one schedule on one job, and the folder from which it is replayed; folders: where such are kept
random_runs   runs of one job, each with a schedule and a number of nodes drawn by its own seed
"""
