"""`ckpt cat` and `verify`: the commands that read packs."""

from __future__ import annotations

import re
import sys
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from checkpointing import Box, Checkpoint, TensorSpec, open_checkpoint, verify
from checkpointing.inspection.arrays import array, widened
from checkpointing.reading.resolver import resolve
from elastic3d.cli.ckpt.completing import complete_tensors
from elastic3d.cli.ckpt.documents import CatDocument, VerifyDocument
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import OneOf, StorePlace, complain
from elastic3d.cli.ckpt.render import checks as shown
from elastic3d.cli.ckpt.telling import bar, print_json, tell
from elastic3d.errors import UsageError

_SLICE = re.compile(r"(-?[0-9]{1,18})?(:(-?[0-9]{1,18})?)?")


class Form(StrEnum):
    """The form in which a tensor is written."""

    TEXT = "text"
    NPY = "npy"
    RAW = "raw"


def cat(
    place: StorePlace,
    tensor: Annotated[str, typer.Argument(metavar="TENSOR", help="Its name.", autocompletion=complete_tensors)],
    checkpoint: OneOf = "latest",
    part: Annotated[
        str,
        typer.Option("--slice", "-s", metavar="A:B,C,...", help="Only these rows.", show_default="all"),
    ] = "",
    form: Annotated[
        Form | None,
        typer.Option("--as", help="What to write.", show_default="text, or by the file's suffix"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it there.", show_default="standard output")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every element, not only the corners.")] = False,
    *,
    as_json: bool,
) -> None:
    """Print or save one tensor, or a part of it.

    Only tiles that hold the part are read and checked. `text` prints numbers as numpy does, `npy` is numpy's file
    format, `raw` the little-endian bytes. Types that numpy lacks, such as bfloat16, become float32 in `text` and `npy`,
    which is exact; `raw` never changes a bit. `--json` prints a description of the tensor, and its elements.

    Examples:

        elastic3d ckpt cat /data/run-7 model/head.weight --slice 0:4,:8

        elastic3d ckpt cat s3://bucket/gpt-1b model/embed.weight --of 1200 -o embed.npy

        elastic3d ckpt cat /data/run-7 optimizer/head.weight/step --json | jq .values
    """
    if as_json and (out is not None or form is not None):
        raise UsageError(f"--json prints numbers, and {'--out' if out is not None else '--as'} asks for something else")
    store = place.open()
    opened = open_checkpoint(store, choose(store, checkpoint).name)
    spec = _named(opened, tensor)
    box, dropped = cut(spec, part)
    data = _read(opened, spec, box)
    shape = tuple(size for dim, size in enumerate(box.shape) if dim not in dropped)
    form = form or _form(out)
    if as_json:
        values = array(spec.dtype, data).reshape(shape)
        print_json(store, CatDocument(checkpoint=opened.name, tensor=spec, box=box, values=_values(values)))
    elif form is Form.TEXT:
        threshold = sys.maxsize if full else 1000
        text = np.array2string(array(spec.dtype, data).reshape(shape), threshold=threshold, max_line_width=120)
        if out is None:
            print(f"{spec.key}  {spec.dtype} {list(spec.shape)}  {box}\n{text}")
        else:
            out.write_text(f"{text}\n")
    else:
        _save(spec, shape, data, form, out)


def verify_store(place: StorePlace, *, as_json: bool) -> None:
    """Read every byte of a store and check it against its digest; exit 1 if something is wrong.

    Every object is checked, whether or not a checkpoint refers to it: packs hold their own digests. Each damaged byte
    is named by tensor, rank and pack, with the checkpoints that it spoils. Where there is nothing at all the exit code
    is 1 too: nothing is proved, and the address may be mistyped.

    Examples:

        elastic3d ckpt verify /data/run-7

        elastic3d ckpt verify s3://bucket/gpt-1b --json | jq '.findings[].tensor'
    """
    store = place.open()
    size = 0
    with bar("verifying") as advance:

        def step(progress: Any) -> None:
            nonlocal size
            size = progress.total
            advance(progress.done, progress.total)

        findings = tuple(verify(store, step))
    faults = Counter(str(finding.fault) for finding in findings)
    data = VerifyDocument(bytes=size, findings=findings, faults=faults)
    tell(store, data, lambda width: shown.findings(store.url, size, findings, width), as_json=as_json)
    if findings or not size:
        raise typer.Exit(1)


def cut(spec: TensorSpec, text: str) -> tuple[Box, tuple[int, ...]]:
    """Return the box of a slice such as `0:4,3`, and the dims that a single index removes; UsageError for others."""
    if not text.strip():
        return spec.box, ()
    items = [item.strip() for item in text.split(",")]
    wrong = f"--slice {text!r}: {spec.key} has shape {list(spec.shape)}; "
    if len(items) > len(spec.shape):
        raise UsageError(f"{wrong}that is {len(spec.shape)} dims, not {len(items)}")
    start, stop, dropped = list(spec.box.start), list(spec.box.stop), []
    for dim, item in enumerate(items):
        match, length = _SLICE.fullmatch(item), spec.shape[dim]
        if match is None or not item:
            raise UsageError(f"{wrong}give rows as A:B or a single one for each dim, without steps, as in 0:4,:8")
        if match[2] is None:
            index = int(match[1]) + (length if match[1].startswith("-") else 0)
            if not 0 <= index < length:
                raise UsageError(f"{wrong}{item} is outside of dim {dim}, which has {length} rows: 0 to {length - 1}")
            start[dim], stop[dim] = index, index + 1
            dropped.append(dim)
        else:
            low, high, _ = slice(*(int(part) if part else None for part in (match[1], match[3]))).indices(length)
            start[dim], stop[dim] = low, max(low, high)
    return Box(start=tuple(start), stop=tuple(stop)), tuple(dropped)


def _named(checkpoint: Checkpoint, tensor: str) -> TensorSpec:
    if tensor in checkpoint.specs:
        return checkpoint.specs[tensor]
    near = [key for key in checkpoint.specs if tensor in key]
    hint = f"did you mean {', '.join(near[:4])}?" if near else "`elastic3d ckpt tree` shows those there are"
    raise UsageError(f"checkpoint {checkpoint.name} has no tensor {tensor!r}; {hint}")


def _read(checkpoint: Checkpoint, spec: TensorSpec, box: Box) -> bytearray:
    data = bytearray(box.numel * spec.itemsize)
    offers = [offer for offer in checkpoint.offers("store") if offer.spec.key == spec.key]
    resolve([(spec, box)], offers, {"store": checkpoint.source("store")}, lambda *_: memoryview(data))
    return data


def _form(out: Path | None) -> Form:
    suffixes = {".npy": Form.NPY, ".bin": Form.RAW, ".raw": Form.RAW}
    return suffixes.get(out.suffix, Form.TEXT) if out is not None else Form.TEXT


def _values(values: Any) -> Any:
    if values.dtype.kind == "c":
        return _values(np.stack([values.real, values.imag], axis=-1))
    return values.tolist()


def _save(spec: TensorSpec, shape: tuple[int, ...], data: bytearray, form: Form, out: Path | None) -> None:
    if out is None and sys.stdout.isatty():
        raise UsageError(f"--as {form} prints bytes, which a terminal cannot show: give --out FILE, or a pipe")
    stream = out.open("wb") if out is not None else sys.stdout.buffer
    try:
        if form is Form.RAW:
            stream.write(data)
        else:
            np.lib.format.write_array(stream, array(spec.dtype, data).reshape(shape), allow_pickle=False)
            if (wider := widened(spec.dtype)) is not None:
                complain(f"{spec.key} is {spec.dtype}, which npy files do not have: written as {wider}, exactly")
        stream.flush()
    finally:
        if out is not None:
            stream.close()
