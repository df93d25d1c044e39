"""What numbers a step computes with and which it keeps: precision, the loss scale, weights of tokens, recomputing."""
