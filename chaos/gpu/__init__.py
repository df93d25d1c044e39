"""What a machine with one accelerator shows: figures and gates, in stages that each have a process and a time limit.

`python -m chaos.gpu --help` says how it is run. Nothing but what elastic3d itself imports is needed.
"""
