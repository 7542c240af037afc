"""Steps of a curriculum inside verl, with a stand-in for verl: it calls what verl calls, in verl's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from winnow.integrations.verl_config import run_config
from winnow.integrations.verl_curriculum import Curriculum
from winnow.integrations.verl_data import VerlRows
from winnow.integrations.verl_rollouts import Trajectory
from winnow.types import Visit

G, PROMPTS, ROWS = 4, 3, 12


def settings_of_verl(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """verl's configuration as nested mappings. `changes`: dotted keys, with `__` for the dots."""
    flat = {
        "data.custom_cls.path": "pkg://winnow.integrations.verl",
        "data.dataloader_num_workers": 0,
        "data.seed": 3,
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": "a/model",
        "actor_rollout_ref.rollout.n": G,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "algorithm.adv_estimator": "grpo",
        "trainer.default_local_dir": str(tmp_path),
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sync.parameter_sync_step": 1,
    }
    nested: dict[str, Any] = {}
    for key, value in (flat | {key.replace("__", "."): value for key, value in changes.items()}).items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return nested


def row(n: int) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{n} + {n} ="}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"index": n},
    }


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    return [row(n) for n in range(count)]


def curriculum_of(tmp_path: Path, data: Sequence[dict[str, Any]] | None = None, **settings: Any) -> Curriculum:
    """`settings`: Winnow's own, as in verl's configuration."""
    return Curriculum(run_config(settings_of_verl(tmp_path), settings), VerlRows(rows() if data is None else data))


def score(ordinal: int, sibling: int, step: int) -> float:
    """Of four prompts one is always solved, one never, and two sometimes."""
    if ordinal % 4 < 2:
        return float(ordinal % 4 == 0)
    return float((ordinal * 7 + sibling * 3 + step) % 5 < 2)


def trajectory(visit: Visit, sibling: int, step: int, reward: float | None = None, **more: Any) -> Trajectory:
    tokens = np.arange(3 + sibling, dtype=np.int64)
    value = score(visit.prompt.ordinal, sibling, step) if reward is None else reward
    given: dict[str, Any] = {"scores": {"score": value, "acc": bool(value), "pred": "8"}, "part": 0}
    return Trajectory(
        visit=visit.number,
        sibling=sibling,
        prompt_ids=(1, 2),
        token_ids=tokens,
        mask=np.ones(len(tokens), bool),
        reward=value,
        **given | more,
    )


def one_step(
    curriculum: Curriculum,
    step: int,
    *,
    reward: Callable[[Visit, int], float] | None = None,
    n: int = PROMPTS,
    train: bool = True,
) -> list[Visit]:
    """Run a step as verl does; return its visits. `train`: verl's update is done, and it asks for something else."""
    visits = curriculum.draw(n, step)
    for visit in visits:
        curriculum.launch(visit, G)
    curriculum.returned(
        trajectory(visit, i, step, None if reward is None else reward(visit, i)) for visit in visits for i in range(G)
    )
    curriculum.finished(0)
    if train:
        curriculum.complete()
    return visits
