"""What a run inside TRL records of TRL's logs, uploads and leaves behind, and what of its account can be checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from winnow import ConfigError, Trainer
from winnow.base.files import private_directory, write_json
from winnow.env.rewards.pooled import PooledReward
from winnow.integrations import trl_loop
from winnow.integrations.trl import WinnowGRPOTrainer, env_reward
from winnow.record.failures import failures_of
from winnow.record.ledger import Ledger
from winnow.record.records import RunDirectoryError, lock
from winnow.run.checkpoint import marks, newest_model
from winnow.study.compare_data import read_run_data
from winnow.study.report_data import read_run
from winnow.tasks.countdown import CountdownConfig

from ..builders.tools import OneTurn
from ..builders.toy_rollouts import EchoEnv
from ..builders.trl_runs import PROMPTS, G, arguments, data, metrics, parity, proven, settings

__all__ = ["arguments", "data"]  # fixtures


def test_values_of_trls_logs_are_those_of_their_step(arguments: dict[str, Any], tmp_path: Path) -> None:
    """TRL logs every `logging_steps`; other steps have no loss, and none has that of an earlier one."""
    args = settings(tmp_path / "out", max_steps=6, logging_steps=2, beta=0.1)
    trainer = WinnowGRPOTrainer(**arguments | {"args": args})
    trainer.train()
    rows = {row["step"]: row for row in metrics(tmp_path / "out")}
    logs = {row["step"]: row for row in trainer.state.log_history if "loss" in row}
    assert [step for step, row in rows.items() if "loss" in row] == [*logs] == [2, 4, 6]
    for step, row in logs.items():
        for name in ("loss", "grad_norm", "entropy", "kl"):
            assert rows[step][name] == row[name]
    assert logs[4]["winnow/num_tokens"] == rows[3]["num_tokens"]  # the last that was booked, no mean


def test_a_step_that_a_loss_scale_skipped_ends_no_run(arguments: dict[str, Any], tmp_path: Path) -> None:
    class Overflowing(WinnowGRPOTrainer):
        steps = 0

        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return torch.tensor(float("inf")) if self.steps == 1 else super()._get_grad_norm(*args, **kwargs)

    Overflowing(**arguments | {"args": settings(tmp_path / "out", max_steps=3)}).train()
    assert ["grad_norm" in row for row in metrics(tmp_path / "out")] == [False, True, True]


def test_uploads_leave_the_account_out(arguments: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".gitignore").write_text("*.log\n")
    WinnowGRPOTrainer(**arguments).train()
    assert (tmp_path / "out" / ".gitignore").read_text() == "*.log\nwinnow/\n"


def test_an_account_is_compared_with_trls_checkpoints(arguments: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "out" / "winnow"

    class Copying(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
                    ledger._db.execute("VACUUM INTO ?", (str(tmp_path / "earlier.sqlite"),))

    args = settings(tmp_path / "out", save_strategy="steps", save_steps=2)
    WinnowGRPOTrainer(**arguments | {"args": args}, callbacks=[Copying()]).train()
    assert [*marks(run)] == ["../checkpoint-4/winnow.json"]
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify(marks(run)).ok
    for file in run.glob("ledger.sqlite*"):
        file.unlink()
    shutil.copy(tmp_path / "earlier.sqlite", run / "ledger.sqlite")
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert not ledger.verify(marks(run)).ok
    with pytest.raises(ConfigError, match="is the account of a run inside TRL or verl"):
        Trainer.resume(run, env="countdown")


def test_what_would_be_wrong_is_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    dora = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ConfigError, match=r"peft_config: .*use_dora=True; use one plain LoraConfig"):
        WinnowGRPOTrainer(**arguments, engine="local", peft_config=dora)
    args = settings(tmp_path / "out", scale_rewards="batch")
    with pytest.raises(ConfigError, match="scale_rewards: batch would divide groups of each size"):
        WinnowGRPOTrainer(**arguments | {"args": args}, group_size="allocate")
    rows = arguments.pop("train_dataset")
    with pytest.raises(ConfigError, match="eval_dataset: TRL evaluates without environments"):
        WinnowGRPOTrainer(**arguments | {"reward_funcs": env_reward}, env="countdown", eval_dataset=rows)


def test_a_task_brings_its_reward_functions(arguments: dict[str, Any], tmp_path: Path) -> None:
    given = arguments | {"train_dataset": None, "args": settings(tmp_path / "out", max_steps=1)}
    task = CountdownConfig(train_size=8, test_size=4).build()
    with pytest.raises(ConfigError, match=r"reward_funcs: env_reward, .* leave reward_funcs out for the task's own"):
        WinnowGRPOTrainer(**given | {"reward_funcs": env_reward}, env=task)
    WinnowGRPOTrainer(**given | {"reward_funcs": None}, env=task).train()
    (row,) = metrics(tmp_path / "out")
    assert "rewards/countdown_reward/mean" in row


@pytest.fixture
def fussy(tmp_path: Path) -> PooledReward:
    """A function in a worker that fails on about a third of the completions."""
    file = tmp_path / "fussy.py"
    file.write_text(
        "def score(text):\n"
        "    number = sum(map(ord, text))\n"
        "    if number % 3 == 0:\n"
        "        raise ValueError('a third')\n"
        "    return float(number % 2)\n"
    )
    return PooledReward("fussy", f"{file}:score", lambda text, row: {"text": text})


def test_a_pooled_reward_fails_single_completions(
    fussy: PooledReward, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """One of a task, with Winnow's engine: the failure has its cause, whatever other functions say."""
    task = CountdownConfig(train_size=8, test_size=4).build()
    task.reward_funcs = [fussy, lambda completions, **columns: [1.0] * len(completions)]
    given = arguments | {"train_dataset": None, "reward_funcs": None}
    WinnowGRPOTrainer(**given, env=task, max_failed_share=1.0).train()
    totals = proven(tmp_path / "out")
    assert totals["failed"]["rollouts"] > 0
    assert totals["trained"]["rollouts"] > 0
    (reason,) = failures_of(tmp_path / "out" / "winnow")
    assert "reward fussy: ValueError: a third" in reason


def test_a_pooled_reward_over_trls_generation(fussy: PooledReward, arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="reward fussy: ValueError: a third.*; this completion has no reward"):
        WinnowGRPOTrainer(**arguments | {"reward_funcs": [fussy, parity]}, filter="zero_variance").train()
    assert proven(tmp_path / "out")["failed"]["rollouts"] > 0
    args = settings(tmp_path / "other")
    lost = PooledReward("lost", fussy.target, lambda text, row: {"text": row["answer"]})
    with pytest.raises(RuntimeError, match="reward lost: KeyError: 'answer'"):
        WinnowGRPOTrainer(**arguments | {"reward_funcs": lost, "args": args}).train()


def test_reward_functions_of_one_name(arguments: dict[str, Any], tmp_path: Path) -> None:
    def at_least(words: int) -> Any:
        return lambda completions, **columns: [float(len(c.split()) >= words) for c in completions]

    args = settings(tmp_path / "out", max_steps=1)
    WinnowGRPOTrainer(**arguments | {"reward_funcs": [at_least(0), at_least(9)], "args": args}).train()
    (row,) = metrics(tmp_path / "out")
    assert (row["rewards/<lambda>/mean"], row["rewards/<lambda>_2/mean"]) == (1.0, 0.0)


def test_a_start_that_fails_leaves_no_account(arguments: dict[str, Any], tmp_path: Path) -> None:
    """So that it may be tried again in the same place, also by the same trainer."""
    calls = []

    def second(completions: list[str], row: list[int], **columns: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 1:
            raise TypeError("a typo")
        return parity(completions, row)

    trainer = WinnowGRPOTrainer(**arguments | {"reward_funcs": second}, selector="greso")
    with pytest.raises(TypeError, match="a typo"):
        trainer.train()
    assert [path.name for path in (tmp_path / "out" / "winnow").iterdir()] == ["run.lock"]
    trainer.train()
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 4 * G * PROMPTS


def test_a_run_that_goes_on_elsewhere_is_not_joined(arguments: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "out" / "winnow"
    private_directory(run)
    trainer = WinnowGRPOTrainer(**arguments)
    with lock(run), pytest.raises(RunDirectoryError, match="another run is using this directory"):
        trainer.train()
    trainer.train()


def test_weights_that_are_not_finite_replace_no_checkpoint(arguments: dict[str, Any], tmp_path: Path) -> None:
    class Poisoning(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                next(model.parameters()).data.fill_(float("nan"))

    args = settings(tmp_path / "out", save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer = WinnowGRPOTrainer(**arguments | {"args": args}, engine="local", callbacks=[Poisoning()])
    with pytest.raises(FloatingPointError, match="nothing was saved since the last checkpoint"):
        trainer.train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert (tmp_path / "out" / "checkpoint-1" / "winnow.json").is_file()


def test_a_save_that_fails_leaves_the_checkpoint_before(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments | {"args": settings(tmp_path / "out", max_steps=3, save_strategy="steps", save_steps=1)}

    def full(path: Path, *values: Any) -> None:
        if path.parent.name == "checkpoint-2":
            path.write_text("{")
            raise OSError(28, "No space left on device")
        write_json(path, *values)

    monkeypatch.setattr(trl_loop, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        WinnowGRPOTrainer(**given).train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    monkeypatch.undo()
    trainer = WinnowGRPOTrainer(**given)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


class WithoutReward(OneTurn):
    """Its environments leave the reward to functions."""

    needs_reward_funcs = True

    def make_env(self, prompt: Any) -> Any:
        return EchoEnv(1)


def test_environments_without_a_reward_need_a_function(arguments: dict[str, Any]) -> None:
    given = arguments | {"reward_funcs": env_reward, "train_dataset": None}
    with pytest.raises(ConfigError, match=r"env_reward, but environments of .* give no reward; use functions of"):
        WinnowGRPOTrainer(**given, env=WithoutReward())


def test_a_start_that_fails_leaves_no_account(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trl_loop, "Records", full)
    with pytest.raises(OSError, match="No space left"):
        WinnowGRPOTrainer(**arguments).train()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    trainer = WinnowGRPOTrainer(**arguments | {"args": settings(Path("out"))})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the account stays where the trainer was made
    trainer.train()
    run = tmp_path / "out" / "winnow"
    with pytest.raises(ConfigError, match="its evaluations are those of TRL or verl"):
        read_run_data(run)
    with pytest.raises(ConfigError, match="inside TRL or verl; name a model that it saved"), newest_model(run):
        pass
    with pytest.raises(FileNotFoundError, match=rf"no such ledger; name {run}"):
        Ledger.open(tmp_path / "out" / "ledger.sqlite", read_only=True)
    with pytest.raises(ValueError, match=rf"Name {run}\."):
        read_run(tmp_path / "out", max_samples=1)
