"""What people want to know about checkpoints, computed from documents alone wherever these suffice."""
