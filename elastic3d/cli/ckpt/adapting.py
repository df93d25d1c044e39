"""`ckpt adapters`: adapters alone, in peft's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from checkpointing.reading.announcing import reading
from elastic3d.cli.ckpt.documents import ExportDocument
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import OneOf, StorePlace
from elastic3d.cli.ckpt.render.words import count, size
from elastic3d.cli.ckpt.telling import bar, tell
from elastic3d.errors import UsageError


def adapters(
    place: StorePlace,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder that is not there yet.")],
    checkpoint: OneOf = "latest",
    *,
    as_json: bool,
) -> None:
    """Write the adapters of a checkpoint alone, as peft loads them.

    TARGET gets `adapter_model.safetensors`, and `adapter_config.json` from what the run has kept of it, so that
    `PeftModel.from_pretrained(model, TARGET)` loads them. Adapters with another name than `default` are in folders of
    their own below it.

    Examples:

        elastic3d ckpt adapters s3://bucket/tuned adapters

        elastic3d ckpt adapters /data/run-7 adapters-1200 --of 1200
    """
    if target.exists():
        raise UsageError(f"{target} is there already, and nothing is overwritten; give another name, or remove it")
    store = place.open()
    with reading(store, choose(store, checkpoint).name) as opened, bar(f"exporting {target.name}") as advance:
        from elastic3d.pretrained.adapter_files import CONFIG, export_adapters  # imports torch, which takes seconds

        done = export_adapters(opened, target, progress=advance)
    what = f"{target}: {count(len(done.adapters), 'adapter')}, {count(done.tensors, 'tensor')}, {size(done.bytes)}"
    what += f" of {opened.name}, as peft loads them"
    if done.without_config:
        what += (
            f"; the checkpoint does not say how {', '.join(done.without_config)} was configured: write {CONFIG} by "
            "LoraConfig(...).save_pretrained(...)"
        )
    data = ExportDocument(
        checkpoint=opened.name,
        step=opened.step,
        target=str(target),
        kind="peft",
        tensors=done.tensors,
        bytes=done.bytes,
        left_out=0,
    )
    tell(store, data, lambda _: Text(what, overflow="fold"), as_json=as_json)
