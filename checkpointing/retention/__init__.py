"""Which checkpoints stay, and how the rest is deleted: tags, pins, retention, collection, repair."""
