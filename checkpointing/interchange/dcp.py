"""`torch.distributed.checkpoint` writing and reading this format: FSDP2, tensor-parallel and pipeline states alike.

    dcp.save(state, storage_writer=Writer("s3://bucket/run", step=100))
    dcp.load(state, storage_reader=Reader("s3://bucket/run"))

Nothing but storage differs from torch's own: each rank's shards are boxes of their global tensors, cut into verified
tiles, and the coordinator commits what all ranks have written, so `latest` never names half a checkpoint.

**Values other than tensors** (`objects`) are kept as JSON if JSON gives them back unchanged, and so are numpy's arrays
and scalars, `io.BytesIO`, dates, paths and members of enums (`plain`). Anything else DCP has pickled with `torch.save`:
it is kept **if torch's `weights_only` unpickler accepts it**, as it does tuples, and otherwise refused when it is
saved, by the name of its class; allow the classes you trust with `torch.serialization.add_safe_globals`, when you save
and when you load.

**Generations.** A Writer fences out every older one at its first save, so that a job that was thought dead can no
longer move `latest`: keep one Writer for the life of a job, and pass `checkpoint_id=step` to each save. If you count
generations already, give yours; you may also do so if you save in another process, where each save gets a copy of the
Writer and would otherwise take a generation of its own.
"""

from __future__ import annotations

from checkpointing.interchange.dcp_reader import Reader
from checkpointing.interchange.dcp_writer import FACTS, Writer

__all__ = ["Writer", "Reader", "FACTS"]
