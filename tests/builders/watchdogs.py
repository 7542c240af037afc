"""Build runs that a watchdog ends."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from winnow import Trainer
from winnow.study.report import write_report

from ..parity import parity_reward


def run(config: dict[str, Any], reward: Callable[..., Any] = parity_reward, resume: bool = False) -> dict[int, str]:
    """Warnings by step; each is on the console, in the file and on the page."""
    directory, out = Path(config["output_dir"]), io.StringIO()
    given: dict[str, Any] = {"reward_funcs": reward}
    trainer = Trainer.resume(directory, **given) if resume else Trainer(config=config, **given)
    trainer.console = Console(file=out, width=1000)
    trainer.train()
    file = directory / "warnings.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    page = write_report([directory], directory.parent / "page.html") or directory.parent / "page.html"
    html = Path(page).read_text()
    for line in found:
        assert f"warning: {line['warning']}" in out.getvalue()
        assert json.dumps(f"Step {line['step']}: {line['warning']}.")[1:-1] in html
    assert out.getvalue().count("warning: ") == len(found)
    return {line["step"]: line["warning"] for line in found}
