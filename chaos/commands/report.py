"""`elastic3d chaos report`: the page of a run, made anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from chaos.growth.report import GROWTH, write_soak_report
from chaos.report.folder import write_report
from elastic3d.errors import Elastic3dError


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `elastic3d chaos run` or `soak` has kept.")],
) -> None:
    """Make the report of a run anew, from what was kept of it: FOLDER/report.html, whose path is printed.

    The page shows what was done when, who noticed it, what each generation cost, and which promises held; of a soak
    what grows, with its slopes and bars. It is one file that loads nothing from elsewhere. Nothing is played.

    Examples:

        elastic3d chaos report chaos-out/failed-7

        elastic3d chaos report chaos-out/soak-7
    """
    try:
        print(write_soak_report(folder) if (folder / GROWTH).exists() else write_report(folder))
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
