"""What the objects of a checkpoint are, as bytes and as values: pure, and the same on every machine."""
