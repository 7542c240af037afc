"""Runs with drafts: what a run without them does, for fewer decoded tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from winnow import ConfigError, Trainer
from winnow.rollout.in_flight import Flight
from winnow.sampler.drafts import Drafts

from ..builders.agents import agent_config
from ..builders.runs import CARRYING, assert_clean, metrics_of, train
from ..builders.selectors import Unrelated
from ..builders.tokenizers import save_chat_model

REWARDS = Path(__file__).resolve().parent.parent / "parity.py"
SPECULATIVE = CARRYING | {"speculative": {"epochs": 8}, "max_steps": 6}


def metrics(run: Path) -> list[dict[str, float]]:
    lines = metrics_of(run)
    return [line for line in lines if "loss" in line]


def decoded(run: Path) -> list[float]:
    """Return the share of each step's tokens that took a decoding step of their own."""
    totals = np.array([[0, 0], *((row["num_decoded_tokens"], row["num_tokens"]) for row in metrics(run))])
    steps = np.diff(totals, axis=0)
    return list(steps[:, 0] / steps[:, 1])


@pytest.mark.parametrize("more", [{}, {"group_size": {"name": "sequential", "probe": 2}}])
def test_drafts_change_nothing_but_what_is_decoded(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Compared with the same run whose drafts are empty."""
    config = tiny_config | SPECULATIVE | more
    with_, without = tmp_path / "with", tmp_path / "without"
    train(config | {"output_dir": str(with_)})
    assert_clean(with_)
    rows = metrics(with_)
    job = Drafts.job
    monkeypatch.setattr(Drafts, "job", lambda *given: replace(job(*given), drafts=()))
    train(config | {"output_dir": str(without)})
    others = metrics(without)
    assert 0 < rows[-1]["num_decoded_tokens"] < others[-1]["num_decoded_tokens"]
    for one, other in zip(rows, others, strict=True):
        for name in ("num_tokens", "reward", "groups/rolled_out"):
            assert one.get(name) == other.get(name)
    weights = [load_file(run / "model" / "model.safetensors") for run in (with_, without)]
    for name, tensor in weights[0].items():
        assert tensor == pytest.approx(weights[1][name], abs=1e-5), name


def test_later_turns_have_drafts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of two turns, which forgets its history in some rollouts, with all drafts and with those of turn one."""
    config = agent_config(save_chat_model(tmp_path / "model"), tmp_path) | {
        "speculative": {"epochs": 8},
        "max_steps": 8,
        "learning_rate": 1e-5,
    }
    both, first = tmp_path / "both", tmp_path / "first"
    train(config | {"output_dir": str(both)})
    assert_clean(both)
    draft = Flight.draft
    monkeypatch.setattr(Flight, "draft", lambda flight, s: () if s.rollout.turns else draft(flight, s))
    train(config | {"output_dir": str(first)})
    rows, others = metrics(both), metrics(first)
    for one, other in zip(rows, others, strict=True):
        assert (one["num_tokens"], one["reward"]) == (other["num_tokens"], other["reward"])
    assert rows[-1]["num_decoded_tokens"] < 0.9 * others[-1]["num_decoded_tokens"]


@pytest.mark.parametrize("more", [{}, {"group_size": {"name": "sequential", "probe": 2}}])
def test_with_new_noise_a_run_is_the_one_without_drafts(
    tiny_config: dict[str, Any], tmp_path: Path, more: dict[str, Any]
) -> None:
    config = tiny_config | CARRYING | {"max_steps": 6} | more
    with_, without = tmp_path / "with", tmp_path / "without"
    train(config | {"speculative": {"epochs": 1}, "output_dir": str(with_)})
    train(config | {"output_dir": str(without)})
    assert_clean(with_)
    rows, others = metrics(with_), metrics(without)
    assert rows[-1]["num_decoded_tokens"] < others[-1]["num_decoded_tokens"] < others[-1]["num_tokens"]
    for one, other in zip(rows, others, strict=True):
        for name in ("num_tokens", "reward", "groups/rolled_out"):
            assert one.get(name) == other.get(name)
    weights = [load_file(run / "model" / "model.safetensors") for run in (with_, without)]
    for name, tensor in weights[0].items():
        assert tensor == pytest.approx(weights[1][name], abs=1e-5), name


def test_drafts_go_along_with_jobs_to_processes(tiny_config: dict[str, Any]) -> None:
    config = tiny_config | {"speculative": {"epochs": 8}, "sync": {"name": "processes", "samplers": 1}, "max_lag": 1}
    config |= {"correction": "truncate", "env": {"name": "countdown", "train_size": 6, "test_size": 8}, "max_steps": 6}
    config |= {"learning_rate": 1e-6}
    Trainer(config=config | {"reward_funcs": [f"{REWARDS}:parity_reward"]}).train()
    assert_clean(Path(config["output_dir"]))
    shares = decoded(Path(config["output_dir"]))
    assert max(shares[-2:]) < 0.8 * shares[0]


def test_rollouts_of_other_epochs_have_other_noise(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    """Without an update, epochs with the same noise have the same rollouts, and the next ones others."""
    config = tiny_config | {"env": {"name": "countdown", "train_size": 4, "test_size": 8}, "learning_rate": 1e-12}
    run = tmp_path / "run"
    train(config | {"speculative": {"epochs": 2}, "max_steps": 5, "output_dir": str(run)})
    assert [share > 0.5 for share in decoded(run)] == [True, False, True, False, True]


def test_engines_without_drafts_are_refused(tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="speculative: with repetition_penalty"):
        Trainer(config=tiny_config | {"speculative": {"epochs": 2}, "repetition_penalty": 1.2}).train()
    with pytest.raises(ConfigError, match=r"speculative\.epochs: .*greater than or equal to 1"):
        Trainer(config=tiny_config | {"speculative": {"epochs": 0}})


def test_blocks_bring_drafts_within_the_first_epoch(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config | SPECULATIVE | {"max_steps": 3, "learning_rate": 1e-6, "output_dir": str(run)}
    prompts = config["prompts_per_step"]
    train(config | {"blocks": {"prompts": prompts, "passes": 2}, "env": {"name": "countdown", "train_size": 64}})
    assert metrics(run)[-1]["epoch"] < 1
    shares = decoded(run)
    assert shares[1] < 0.8 * shares[0]
    assert_clean(run)


def test_blocks_that_cannot_be_made_are_refused(tiny_config: dict[str, Any]) -> None:
    values = tiny_config | {"blocks": {"prompts": 24}}
    with pytest.raises(ConfigError, match="blocks: prompts: 24 has no effect on a data set of 24"):
        Trainer(config=values)
    with pytest.raises(ConfigError, match="blocks: cannot order the visits of a Unrelated; derive it from"):
        Trainer(config=tiny_config | {"blocks": {"prompts": 4}, "selector": f"{Unrelated.__module__}:Unrelated"})
