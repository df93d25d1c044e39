"""`ckpt export`: checkpoints in other tools' formats, one of them, or each new one as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from checkpointing.reading.announcing import reading
from checkpointing.reading.following import MOVING
from checkpointing.reading.reader import Checkpoint
from elastic3d.cli.ckpt import export_following
from elastic3d.cli.ckpt.documents import ExportDocument
from elastic3d.cli.ckpt.export_following import LookEvery, UntilStep
from elastic3d.cli.ckpt.interchange import SUFFIXES
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import OneOf, StorePlace
from elastic3d.cli.ckpt.provenance import made_by
from elastic3d.cli.ckpt.render.words import count, size
from elastic3d.cli.ckpt.telling import Advance, bar, tell
from elastic3d.errors import UsageError
from elastic3d.quantities import size as size_of
from elastic3d.quantities import some_seconds

if TYPE_CHECKING:
    from checkpointing.interchange import Exported

MODEL = "model/"


class ExportFormat(StrEnum):
    """The format in which a checkpoint is written."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HF = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportWish:
    """How checkpoints are to be written. prefix: None for what is usual. config: folder of a model's configuration."""

    kind: ExportFormat
    prefix: str | None
    config: Path | None
    shard_bytes: int | None

    @property
    def suffix(self) -> str:
        """How the name of what is written into a folder of many ends."""
        return ".pt" if self.kind is ExportFormat.TORCH else ""

    def write(self, opened: Checkpoint, target: Path, advance: Advance) -> Exported:
        """Write one; errors are those of `export_checkpoint` and `export_model`."""
        if self.kind is not ExportFormat.HF:
            from checkpointing.interchange import export_checkpoint  # imports torch, which takes seconds

            return export_checkpoint(str(self.kind), opened, target, prefix=self.prefix or "", progress=advance)
        from elastic3d.huggingface import describing, writing

        description = (
            describing.of_folder(self.config)
            if self.config is not None
            else describing.recorded(made_by(opened.name, opened.facts), opened.name)
        )
        prefix = MODEL if self.prefix is None else self.prefix
        return writing.export_model(
            opened, target, description, prefix=prefix, shard_bytes=self.shard_bytes, progress=advance
        )

    def document(self, opened: Checkpoint, target: Path, done: Exported) -> ExportDocument:
        """Return what was written, as `--json` has it."""
        return ExportDocument(
            checkpoint=opened.name,
            step=opened.step,
            target=str(target),
            kind=str(self.kind),
            tensors=done.tensors,
            bytes=done.bytes,
            left_out=done.left_out,
        )


def export(
    place: StorePlace,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A file or folder that is not there yet.")],
    checkpoint: OneOf = "latest",
    kind: Annotated[
        ExportFormat | None,
        typer.Option("--to", "--as", help="The format; hf is a folder for from_pretrained.", show_default="by TARGET"),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            help="Only tensors under this prefix, such as model/; it is cut off their names.",
            show_default="all; model/ with --to hf",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FOLDER",
            help="With --to hf: where config.json and a tokenizer are.",
            show_default="what the checkpoint has",
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="With --to hf: most of one file.", show_default="5GB")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Write each new one into the folder TARGET, as it comes.")
    ] = False,
    once_after: Annotated[
        int | None,
        typer.Option("--once-after", metavar="STEP", min=-1, help="With --follow: end after one later than this step."),
    ] = None,
    until_step: UntilStep = None,
    every: LookEvery = "2s",
    *,
    as_json: bool,
) -> None:
    """Write a checkpoint in another tool's format: DCP, safetensors, torch.save, or a folder for transformers.

    Every tile is checked as it is read. Tensors are streamed, so that the whole never has to fit in memory. `--to hf`
    writes what `from_pretrained` loads: `config.json`, weights under the names that the model's files have, in shards
    with an index where they are large, and the tokenizer that lies in `--config FOLDER`. It needs transformers, which
    says what the model's tensors are; where the checkpoint's are others, they are named and nothing is written.

    `--follow` waits for the checkpoints of a live run, and writes `TARGET/step-N` for each that is committed, or is
    found to be `--of verified` or `vetted`, from the newest on. It goes on where it was when it is started again:
    `TARGET/exported.jsonl` has lines for each. Collections leave alone what it reads, and a store that does not answer
    is waited for. Ctrl-C leaves no half of anything; with `--json` each is one line.

    Examples:

        elastic3d ckpt export s3://bucket/gpt-1b model.safetensors --prefix model/

        elastic3d ckpt export s3://bucket/llama-1b@vetted llama-1b --to hf

        elastic3d ckpt export s3://bucket/gpt-1b dcp-folder --to dcp --of verified

        elastic3d ckpt export s3://bucket/llama-1b@verified models --to hf --follow --until-step 20000
    """
    wish = wished(target, kind, prefix, config, shard_size, follow=follow)
    ends = [name for name, value in (("--once-after", once_after), ("--until-step", until_step)) if value is not None]
    if ends and not follow:
        raise UsageError(f"{ends[0]} says when --follow ends; give --follow too")
    if follow and checkpoint not in MOVING:
        raise UsageError(f"--follow goes with {', '.join(MOVING)}: {checkpoint!r} stays where it is")
    if follow:
        seconds = some_seconds(every, "--every")
        export_following.follow(
            place.open(patience=export_following.PATIENCE),
            checkpoint,
            target,
            wish,
            every=seconds,
            once_after=once_after,
            until_step=until_step,
            as_json=as_json,
        )
        return
    if target.exists():
        raise UsageError(f"{target} is there already, and nothing is overwritten; give another name, or remove it")
    store = place.open()
    with reading(store, choose(store, checkpoint).name) as opened, bar(f"exporting {target.name}") as advance:
        done = wish.write(opened, target, advance)
    data = wish.document(opened, target, done)
    tell(store, data, lambda _: Text(in_words(data), overflow="fold"), as_json=as_json)


def in_words(data: ExportDocument) -> str:
    """Return what was written, for people."""
    what = f"{data.target}: {count(data.tensors, 'tensor')}, {size(data.bytes)} of {data.checkpoint}, as {data.kind}"
    return what + (f"; {count(data.left_out, 'object')} that are not tensors left out" if data.left_out else "")


def wished(
    target: Path,
    kind: ExportFormat | None,
    prefix: str | None,
    config: Path | None,
    shard_size: str,
    *,
    follow: bool = False,
) -> ExportWish:
    """Return how to write; UsageError for options that do not go together."""
    if kind is None and follow:
        raise UsageError("--follow writes many into one folder: give --to dcp, torch, safetensors or hf")
    if kind is None and target.suffix not in SUFFIXES:
        raise UsageError(
            f"{target}: give --to dcp, torch, safetensors or hf, or a name that ends in .pt or .safetensors"
        )
    kind = kind or ExportFormat(SUFFIXES[target.suffix])
    if kind is not ExportFormat.HF and (config is not None or shard_size):
        raise UsageError(f"{'--config' if config is not None else '--shard-size'} goes with --to hf")
    if kind is ExportFormat.HF and target.suffix in SUFFIXES and not follow:
        raise UsageError(f"{target}: --to hf writes a folder; give it a name without {target.suffix}")
    if config is not None and not config.is_dir():
        raise UsageError(f"--config {config} is no folder; give one with the config.json of the model")
    return ExportWish(
        kind=kind,
        prefix=prefix,
        config=config,
        shard_bytes=size_of(shard_size, "--shard-size") if shard_size else None,
    )
