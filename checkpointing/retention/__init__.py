"""Which checkpoints stay, and how the rest goes: tags, pins, retention, collection, repair."""
