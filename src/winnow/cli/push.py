"""`winnow push`: uploads a run's model to a hub."""

from __future__ import annotations

from dataclasses import asdict

import typer

from .console import Json, Overrides, Run, command, show

app = typer.Typer()


@command(app)
def push(run: Run, overrides: Overrides = None, as_json: Json = False) -> None:
    """Upload a run's model to a Hugging Face hub, once more or for the first time: hub_model_id=me/name.

    The finished `model/`, or that of the last checkpoint. The token is that of HF_TOKEN or `hf auth login`.
    """
    from ..base.errors import ConfigError
    from ..config import HUB, read_settings, validate
    from ..record.records import CONFIG, read_config

    for key in {override.partition("=")[0] for override in overrides or ()}:
        if key not in (*HUB, "save_dtype"):
            raise ConfigError(f"{key}: has no effect here; push takes {', '.join(HUB)} and save_dtype")
    values = read_settings(None, overrides or (), read_config(run)) | {"push_to_hub": True, "output_dir": str(run)}
    config = validate(values, str(run / CONFIG))
    from ..run.hub import check_hub
    from ..run.hub import push as upload  # takes seconds

    check_hub(config)
    show(asdict(upload(run, config)), as_json, lambda f: f"{f['folder']} is in {f['repo']}: {f['url']}")
