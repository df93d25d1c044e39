"""One model over many ranks with the same bits as over one: cutting, ordered sums, keyed randomness, the step vote."""
