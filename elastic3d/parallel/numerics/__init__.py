"""The numbers that a step computes with and keeps: precision, the loss scale, weights of tokens, recomputation."""
