"""A run's checkpoints evaluated beside it: `elastic3d eval`.

answering the script's side: its `evaluate` function, called for one checkpoint
asking    the command's side: processes of the script for one checkpoint, and their answer
results   the file of what was found, so that no checkpoint is evaluated twice
"""
