"""What a person wants to know of checkpoints, computed from documents alone wherever these suffice."""
