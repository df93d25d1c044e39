"""A node's part in the run's checkpoints: uploads, commits, verification and retention."""
