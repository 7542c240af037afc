"""`winnow verify` and `report`: what a run did, read off its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Json, Run, command, show

app = typer.Typer()


@command(app)
def verify(run: Run, as_json: Json = False) -> None:
    """Prove from the ledger alone that everything dispatched came back exactly once, and show where it went."""
    from ..record.ledger import Ledger
    from ..record.proof import render, to_json
    from ..record.records import LEDGER

    with Ledger.open(run / LEDGER, read_only=True) as ledger:
        proof = ledger.verify()
    show(to_json(proof), as_json, lambda _: render(proof))
    if not proof.ok:
        raise typer.Exit(1)


@command(app)
def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run directories.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page: curves, where every token went, samples."""
    from ..study.report import write_report

    write_report(runs, output)
    found = {"page": str(output), "runs": [str(run) for run in runs], "bytes": output.stat().st_size}
    show(found, as_json, lambda f: f"{f['page']} ({f['bytes'] / 1e6:.2f} MB)")
