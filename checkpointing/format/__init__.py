"""The objects of a checkpoint, as bytes and as values: pure, and the same on every machine."""
