"""An engine that holds more than this process's memory, as vLLM does, is closed with the run that built it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from winnow import ConfigError, Trainer
from winnow.engine.local.engine import LocalEngine
from winnow.run.standalone import evaluate_model

from .. import parity

REWARDS = {"reward_funcs": [f"{parity.__file__}:parity_reward"]}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Engines of this test that were closed; the embedded one has nothing to close by itself."""
    found: list[Any] = []
    monkeypatch.setattr(LocalEngine, "close", lambda self: found.append(self), raising=False)
    return found


def test_a_run_its_resume_and_an_evaluation_close_theirs(tiny_config: dict[str, Any], closed: list[Any]) -> None:
    trainer = Trainer(config=tiny_config | REWARDS | {"max_steps": 1})
    trainer.train()
    assert closed == [trainer.engine]
    with pytest.raises(ConfigError, match=r"evaluate: what samples has ended with the run; run `winnow eval .*run`"):
        trainer.evaluate()
    resumed = Trainer.resume(tiny_config["output_dir"], {"max_steps": 2})
    resumed.train()
    assert closed == [trainer.engine, resumed.engine]
    evaluate_model(tiny_config["output_dir"], {})
    assert len(closed) == 3


def test_inside_trl_it_ends_with_the_training_and_a_resume_has_another(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset

    from winnow.integrations.trl import WinnowGRPOTrainer

    from ..builders.trl_runs import parity as reward
    from ..builders.trl_runs import settings

    closed: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "close", lambda self: closed.append(self), raising=False)
        rows = Dataset.from_list([{"prompt": f"{1 + i % 6} {1 + i // 6} 2", "row": i} for i in range(24)])
        args = settings(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
        given = {"model": str(tiny_model), "reward_funcs": reward, "train_dataset": rows, "args": args}
        trainer = WinnowGRPOTrainer(**given, engine="local")
        trainer.train()
        assert len(closed) == 1
        args.max_steps = 3
        trainer.train(resume_from_checkpoint=True)
        assert len(closed) == 2
        assert closed[0] is not closed[1]
    assert trainer.state.global_step == 3
