"""verl's synchronous trainer without GPUs: only generation and the update are stand-ins.

Its loop, data loader, replay buffer, queue (TransferQueue, under Ray) and checkpoints are verl's own, and its
configuration is composed as its command does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import transfer_queue as tq
from hydra import compose, initialize_config_module
from tensordict.tensorclass import NonTensorData, NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from winnow.engine.loading import load_tokenizer

from .verl_steps import PROMPTS, G, row, score

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verl.md"


def settings_of_the_page() -> list[str]:
    """Overrides in the first block of the page."""
    block = re.search(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    return [word for word in block[1].split() if "=" in word]


def config_of(tmp_path: Path, model: Path, overrides: Sequence[str], *, rows: int = 12) -> Any:
    """verl's configuration, with the page's settings, those that a small run needs, and `overrides`."""
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(rows)]), file)
    small = [
        f"data.train_files={file}",
        f"data.val_files={file}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "data.seed=3",
        "data.val_batch_size=4",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.n={G}",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm.adv_estimator=grpo",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        "trainer.logger=[console]",
        "trainer.total_training_steps=6",
        "trainer.total_epochs=100",
        "trainer.save_freq=2",
        "trainer.test_freq=3",
        "trainer.val_before_train=True",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*small, *settings_of_the_page(), *overrides])


class Workers:
    """In the place of verl's workers on GPUs."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Rollouts:
    """In the place of verl's agent loops: puts trajectories into verl's queue as `AgentLoopWorkerTQ` does.

    `fails`: tells by row number, session and step which sessions raise an error.
    """

    def __init__(self, fails: Callable[[int, int, int], bool] | None = None, reward: Any = None) -> None:
        self.fails = fails or (lambda index, session, step: False)
        self.reward = reward or score
        self.asked: list[tuple[int, int]] = []
        """Step and row number of each training prompt."""

    def generate_sequences(self, batch: Any) -> None:
        held_out = "validate" in batch
        for i in range(len(batch)):
            prompt = {key: _item(value, i) for key, value in batch.items() if key != "validate"}
            self._run(prompt, "val" if held_out else "train")

    def _run(self, prompt: dict[str, Any], partition: str) -> None:
        step, index = int(prompt["global_steps"]), int(prompt["index"])
        size = int(prompt.pop("__rollout_n__", G if partition == "train" else 1))
        if partition == "train":
            self.asked.append((step, index))
        sessions = [i for i in range(size) if not (partition == "train" and self.fails(index, i, step))]
        fields, tags = [], []
        for session in sessions:
            output = AgentLoopOutput(
                prompt_ids=[5, 6],
                response_ids=list(range(3 + session)),
                response_mask=[1] * (3 + session),
                num_turns=2,
                metrics=AgentLoopMetrics(),
                reward_score=self.reward(index, session, step),
                extra_fields={"reward_extra_info": {"acc": 1.0, "pred": "8"}},
            ).as_dict()
            fields.append(output | prompt | {"loss_mask": output["response_mask"]})
            tags.append({"status": "success", "global_steps": step, "seq_len": 5 + session})
        uid = prompt["uid"]
        if fields:
            keys = [f"{uid}_{session}_0" for session in sessions]
            tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=partition)
        status = "finished" if len(sessions) == size else "failure"
        tq.kv_put(key=uid, partition_id=partition, tag={"status": status})


def _item(value: Any, i: int) -> Any:
    if isinstance(value, NonTensorStack):
        return value[i].data
    return value.data if isinstance(value, NonTensorData) else value[i]


class KilledError(Exception):
    """verl dies in an update."""


class Trainer(PPOTrainerSync):
    """`trained`: keys of the batch of each step. `dies_at`: the step whose update raises `KilledError`."""

    def __init__(self, config: Any, *, dies_at: int | None = None) -> None:
        self.trained: list[list[str]] = []
        self.logged: list[dict[str, float]] = []
        self.dies_at = dies_at
        super().__init__(config)

    def _setup(self) -> None:
        self.tokenizer, self.processor = load_tokenizer(self.config.actor_rollout_ref.model.path), None
        self._init_dataloader()
        self._init_dump_executor()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.checkpoint_manager, self.actor_rollout_wg = Workers(), Workers()
        self._load_checkpoint()

    def _as_it_is(self, batch: Any, metrics: Any = None, **given: Any) -> Any:
        return batch

    _balance_batch = _compute_old_log_prob = _compute_advantage = _as_it_is

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        if self.global_steps == self.dies_at:
            raise KilledError
        self.trained.append(list(batch.keys))
        return batch

    def _compute_metrics(self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int) -> None:
        self.logged.append(dict(metrics))


def run(config: Any, rollouts: Rollouts | None = None, *, dies_at: int | None = None) -> Trainer:
    """Run verl's `fit`, with an empty queue as in a new process."""
    for partition, items in (tq.kv_list() or {}).items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)
    trainer = Trainer(config, dies_at=dies_at)
    trainer.init()
    try:
        trainer.fit(rollouts or Rollouts())
    except KilledError:
        pass
    finally:
        if trainer.replay_buffer.curriculum is not None:
            trainer.replay_buffer.curriculum.close()
    return trainer


def ordinals_of(rollouts: Rollouts, step: int) -> list[int]:
    return [index for at, index in rollouts.asked if at == step]
