"""Checkpoints to and from other tools: torch.distributed.checkpoint, torch.save and safetensors.

`import_checkpoint` and `export_checkpoint` move files; `checkpointing.interchange.dcp` lets DCP itself read and write
this format. Only this package imports torch.
"""

from checkpointing.interchange.dcp import Reader, Writer
from checkpointing.interchange.transfer import Exported, Kind, export_checkpoint, import_checkpoint

__all__ = ["import_checkpoint", "export_checkpoint", "Exported", "Kind", "Writer", "Reader"]
