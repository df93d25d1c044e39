"""From pieces to a committed checkpoint: what each rank writes, and what the leader does with it."""
