"""`winnow demo`, which may be asked for once more."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from winnow.base.errors import ConfigError
from winnow.study.demo import run_demo

SMALL = ("max_steps=1", "seed=1", "warm_start.max_steps=2", "eval_prompts=4", "eval_generations=1")


def test_a_demo_needs_its_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval_steps: the demo compares held-out figures"):
        run_demo(tmp_path, ("eval_steps=null",), Console(quiet=True))


@pytest.mark.slow
def test_overrides_of_a_demo_that_is_there(tmp_path: Path) -> None:
    """The same ones go on with it; what a resume may change is changed; the rest is refused by name."""
    quiet = Console(quiet=True)
    assert run_demo(tmp_path, SMALL, quiet)["step"] == 1
    assert run_demo(tmp_path, SMALL, quiet)["step"] == 1
    with pytest.raises(ConfigError, match="learning_rate: cannot change on a resume"):
        run_demo(tmp_path, (*SMALL, "learning_rate=0.5"), quiet)
    with pytest.raises(ConfigError, match=r"output_dir: the demo's run is .*; name its folder with --output"):
        run_demo(tmp_path, ("output_dir=elsewhere",), quiet)
    assert run_demo(tmp_path, ("max_steps=2",), quiet)["step"] == 2
