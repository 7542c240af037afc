"""Runs with drafts: what a run without them does, for fewer decoded tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from winnow import ConfigError, Trainer
from winnow.rollout.in_flight import Flight

from ..builders.agents import agent_config
from ..builders.runs import CARRYING, REPEATING, assert_clean, metrics_of, train
from ..builders.tokenizers import save_chat_model

REWARDS = Path(__file__).resolve().parent.parent / "parity.py"


@pytest.fixture(autouse=True)
def _short_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny runs have short rollouts."""
    monkeypatch.setattr("winnow.rollout.drafts.WORTH_STEPS", 0.0)


def metrics(run: Path) -> list[dict[str, float]]:
    lines = metrics_of(run)
    return [line for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"group_size": {"name": "sequential", "probe": 2}, "num_generations": 4}])
def test_a_run_is_the_one_without_drafts(tiny_config: dict[str, Any], tmp_path: Path, more: dict[str, Any]) -> None:
    config = tiny_config | CARRYING | REPEATING | {"max_steps": 6} | more
    with_, without = tmp_path / "with", tmp_path / "without"
    train(config | {"speculative": True, "output_dir": str(with_)})
    train(config | {"output_dir": str(without)})
    assert_clean(with_)
    rows, others = metrics(with_), metrics(without)
    assert rows[-1]["num_decoded_tokens"] < 0.8 * others[-1]["num_decoded_tokens"] < others[-1]["num_tokens"]
    assert rows[-1]["num_computed_tokens"] > rows[-1]["num_decoded_tokens"], "what is read is computed, too"
    for one, other in zip(rows, others, strict=True):
        for name in ("num_tokens", "reward", "groups/rolled_out"):
            assert one.get(name) == other.get(name)
    weights = [load_file(run / "model" / "model.safetensors") for run in (with_, without)]
    for name, tensor in weights[0].items():
        assert tensor == pytest.approx(weights[1][name], abs=1e-5), name


@pytest.mark.slow
def test_later_turns_have_drafts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of two turns, which forgets its history in some rollouts, with all drafts and with those of turn one."""
    config = agent_config(save_chat_model(tmp_path / "model"), tmp_path) | {
        "speculative": True,
        "max_steps": 8,
        "learning_rate": 1e-5,
        "temperature": 0.003,
    }
    both, first = tmp_path / "both", tmp_path / "first"
    train(config | {"output_dir": str(both)})
    assert_clean(both)
    draft = Flight.draft
    monkeypatch.setattr(Flight, "draft", lambda flight, s: () if s.rollout.turns else draft(flight, s))
    train(config | {"output_dir": str(first)})
    rows, others = metrics(both), metrics(first)
    assert len(rows) > 2
    for one, other in zip(rows, others, strict=True):
        assert (one["num_tokens"], one["reward"]) == (other["num_tokens"], other["reward"])
    assert rows[-1]["num_decoded_tokens"] < 0.95 * others[-1]["num_decoded_tokens"]


@pytest.mark.slow
def test_drafts_go_along_with_jobs_to_processes(tiny_config: dict[str, Any]) -> None:
    """Next to a run without any, as the work that one asynchronous step receives varies."""
    config = tiny_config | {"sync": {"name": "processes", "samplers": 1}, "max_lag": 1, "correction": "truncate"}
    config |= {"env": {"name": "countdown", "train_size": 6, "test_size": 8}, "max_steps": 6}
    config |= REPEATING | {"filter": "keep_all", "reward_funcs": [f"{REWARDS}:parity_reward"]}
    shares = []
    for drafts in (False, True):
        run = Path(f"{config['output_dir']}-{drafts}")
        Trainer(config=config | {"speculative": drafts, "output_dir": str(run)}).train()
        assert_clean(run)
        first, *_, last = metrics(run)
        later = {key: last[key] - first[key] for key in ("num_decoded_tokens", "num_tokens")}
        shares.append(later["num_decoded_tokens"] / later["num_tokens"])
    assert shares[1] < 0.9 * shares[0]


def test_engines_without_drafts_are_refused(tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="speculative: with repetition_penalty"):
        Trainer(config=tiny_config | {"speculative": True, "repetition_penalty": 1.2}).train()
