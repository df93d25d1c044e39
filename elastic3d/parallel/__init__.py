"""One model over many ranks with the same bits as over one: cutting, ordered sums, keyed randomness, the step vote."""

from elastic3d.torch_support import check_names

check_names()
