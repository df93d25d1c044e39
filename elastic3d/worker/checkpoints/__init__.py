"""A node's part in the run's checkpoints: tiles into the store, commits, what is read back and let go."""
