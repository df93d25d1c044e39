"""From a committed checkpoint back to tensors, every link checked."""
