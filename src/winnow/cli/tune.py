"""`winnow tune`: the fastest settings of a run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from ..base.errors import ConfigError
from ..base.machine import lasting_imports
from .console import Json, Overrides, command, progress_console, run_config, show

app = typer.Typer()


@command(app)
def tune(
    config: Annotated[Path, typer.Argument(help="YAML file of a run.")],
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes to measure, simulate and run.")] = 10.0,
    output: Annotated[Path, typer.Option("-o", "--output", help="YAML file to write.")] = Path("tuned.yaml"),
    as_json: Json = False,
) -> None:
    """Find the settings with the fewest seconds to equal signal on this machine, and write them with reasons.

    Measures costs in short runs, simulates other settings, and runs the best few and other learning rates. A page of
    predicted and measured seconds is written next to the file. The same command continues an interrupted one.
    """
    from ..base.files import check_output
    from ..config import read_settings

    if output.suffix not in (".yaml", ".yml") or output.resolve() == config.resolve():
        raise ConfigError(f"-o {output}: name another YAML file than {config}")
    check_output(output)
    c, values = run_config(config, overrides), read_settings(config, overrides or ())
    with lasting_imports():
        from ..study.tune import tune as run
        from ..study.tune_files import summary, write_config, write_page

    console = progress_console(as_json)
    folder, page = output.with_suffix(".tune"), output.with_suffix(".html")
    found = run(c, folder, minutes, lambda line: console.print(line, highlight=False, soft_wrap=True))
    write_config(values, found, output)
    write_page(found, page)
    found |= {"config": str(output), "page": str(page)}
    show(found, as_json, lambda f: Group(*summary(f), f"{f['config']} has the settings, {f['page']} the seconds"))
