"""`winnow verify`, `report` and `watch`: what a run did or does, read from its directory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .console import Json, Run, command, show

app = typer.Typer()


@command(app)
def verify(run: Run, as_json: Json = False) -> None:
    """Prove from the ledger that everything dispatched came back exactly once, and show where it went.

    A damaged ledger, or one that does not belong to the newest checkpoint, is reported as such.
    """
    from ..record.ledger import Ledger
    from ..record.proof import render
    from ..record.records import LEDGER
    from ..run.checkpoint import marks

    found = marks(run)
    with Ledger.open(run / LEDGER, read_only=True) as ledger:
        proof = ledger.verify(found)
    show(asdict(proof), as_json, lambda _: render(proof))
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


@command(app)
def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, finished or running.")],
    host: Annotated[str, typer.Option(help="Address; any but the default is open to others.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8642,
    token: Annotated[str | None, typer.Option(help="Secret in the address; default: a new one.")] = None,
    as_json: Json = False,
) -> None:
    """Serve the report page of running runs; it keeps itself up to date. Ctrl-C ends it."""
    from ..study.watch import Watch

    with Watch(runs, host, port, token) as server:
        show({"url": server.url, "runs": [str(run) for run in runs]}, as_json, lambda f: f"{f['url']}  (Ctrl-C ends)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
