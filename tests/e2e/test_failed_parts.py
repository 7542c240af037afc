"""What goes wrong beside the training: it costs no step that was done, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.engine.local.engine import LocalEngine
from winnow.rollout.evaluate import RolloutsFailedError
from winnow.run import build, checkpoint, session

from ..builders.runs import assert_clean, metrics_of
from ..parity import parity_reward

Config = dict[str, Any]


class Judge:
    """Fails for held-out prompts between two steps."""

    def __init__(self, fails: range) -> None:
        self.fails, self.held_out = fails, set[str]()

    def __call__(
        self, prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any
    ) -> list[float | None]:
        if prompts[0] in self.held_out and trainer_state.global_step in self.fails:
            raise ConnectionError("the judge is away")
        return parity_reward(completions, **columns)


def trainer_with(judge: Judge, config: Config) -> Trainer:
    trainer = Trainer(config=config, reward_funcs=judge)
    judge.held_out = {prompt.text for prompt in trainer.task.test}
    return trainer


def test_an_evaluation_without_a_judged_rollout_ends_no_run(tiny_config: Config) -> None:
    trainer_with(Judge(range(1, 3)), tiny_config | {"eval_steps": 1}).train()
    run = Path(tiny_config["output_dir"])
    assert_clean(run)
    (warning,) = (run / "warnings.jsonl").read_text().splitlines()
    assert "held-out rollouts failed (100%)" in warning
    assert "the judge is away" in warning
    rows = [row for row in metrics_of(run) if "eval/failed" in row]
    assert [row["eval/failed"] for row in rows] == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert ["eval/pass@1" in row for row in rows] == [True, False, False, True, True]


def test_a_first_evaluation_without_one_does(tiny_config: Config) -> None:
    with pytest.raises(RolloutsFailedError, match=r"all 8 failed; first cause: .*the judge is away"):
        trainer_with(Judge(range(1)), tiny_config).train()


def test_parts_of_a_start_that_fails_are_closed(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []

    def refused(*args: Any) -> None:
        raise ConfigError("reuse: refused here")

    monkeypatch.setattr(build, "close_engine", closed.append)
    monkeypatch.setattr(build.Rewarder, "close", lambda rewarder: closed.append(rewarder))
    for failing, parts in (("check_prompts", 2), ("require_whole_groups", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(build, failing, refused)
            with pytest.raises(ConfigError, match="refused here"):
                Trainer(config=tiny_config)
        assert [type(part) for part in closed] == [LocalEngine, build.Rewarder][-parts:]
        closed.clear()
    with pytest.raises(ConfigError, match="callbacks"):
        Trainer(config=tiny_config, callbacks=[3])
    assert closed == [], "nothing was built"


def test_a_model_is_whole_or_not_there(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it is written, the run has the model of its last checkpoint."""

    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    run = Path(tiny_config["output_dir"])
    with monkeypatch.context() as patch:
        patch.setattr(session, "write_card", full)
        with pytest.raises(OSError, match="no space"):
            Trainer(config=tiny_config, reward_funcs=parity_reward).train()
    with checkpoint.newest_model(run) as (_, shown):
        assert shown == run / "checkpoints" / "step-000004" / "model"
    Trainer.resume(run, reward_funcs=parity_reward).train()
    with checkpoint.newest_model(run) as (_, shown):
        assert shown == run / "model"
    assert not (run / checkpoint.WRITING).exists()


def test_a_model_that_was_not_written_is_not_said_to_be_saved(tiny_config: Config, tmp_path: Path) -> None:
    trainer = Trainer(config=tiny_config | {"max_steps": 1}, reward_funcs=parity_reward)
    trainer.step()
    trainer.close()
    trainer.learner.model = None  # as with ranks, which have ended
    for target in (None, tmp_path / "elsewhere"):
        with pytest.raises(ConfigError, match=r"save_model: the run ended without .*checkpoints/step-N/model"):
            trainer.save_model(target)


def test_reward_functions_may_come_one_by_one(tiny_config: Config) -> None:
    def short(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text) < 9) for text in completions]

    trainer = Trainer(config=tiny_config, reward_funcs=(f for f in (parity_reward, short)))
    assert trainer.rewarder.names == ["parity_reward", "short"]
