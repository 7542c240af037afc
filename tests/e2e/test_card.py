"""The model card that a finished run writes: what a hub reads, and the figures of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.parity import parity_reward
from winnow import Trainer
from winnow.config import validate
from winnow.record.ledger import Ledger
from winnow.run.hub import write_card


def test_the_card_of_a_run(tiny_config: dict[str, Any]) -> None:
    options = {"selector": "greso", "filter": "zero_variance", "advantage": "rloo", "max_steps": 2, "eval_steps": 2}
    last = Trainer(config=tiny_config | options, reward_funcs=parity_reward).train()
    run = Path(tiny_config["output_dir"])
    card = ModelCard.load(run / "model" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["winnow", "reinforcement-learning"]
    assert card.data.base_model is None  # a directory is no name of a hub
    assert "2 optimizer steps" in card.text
    assert "| pass@1 |" in card.text
    assert f"{last['eval/pass@1']:.3f} |" in card.text
    assert "- `selector: greso`: GRESO (Zheng et al. 2025)" in card.text
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        trained = ledger.totals()["trained"]
    assert f"| trained | {trained['rollouts']:,.0f} | {trained['tokens']:,.0f} |" in card.text
    assert str(run) not in card.text
    again = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    assert validate(again).selector == "greso"
    assert again["max_steps"] == 2


def test_a_base_model_of_a_hub_is_named(tmp_path: Path) -> None:
    write_card(tmp_path, validate({"model": "Qwen/Qwen3-0.6B", "env": "countdown"}), {}, [])
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "Qwen/Qwen3-0.6B"


def test_a_card_does_not_say_whose_home_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    env = {"name": "dataset", "path": "/home/somebody/rows.jsonl"}
    write_card(tmp_path, validate({"model": "m", "env": env, "reward_funcs": ["exact"]}), {}, [])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "~/rows.jsonl" in text
    assert "somebody" not in text
