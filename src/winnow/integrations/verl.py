"""Winnow's selectors, ledger and report page inside verl 0.9: a data set and a replay buffer for its configuration.

    data.custom_cls.path=pkg://winnow.integrations.verl data.custom_cls.name=WinnowDataset
    trainer.v1.sampler.custom_sampler.path=pkg://winnow.integrations.verl
    trainer.v1.sampler.custom_sampler.name=WinnowReplayBuffer
    data.dataloader_num_workers=0 +trainer.v1.sampler.sampler_kwargs.selector=greso

verl builds both objects in one process, the buffer first. Its data loader asks the data set for prompts and saves the
data set's state; its trainer asks the buffer for the rollouts. Everything else is verl's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ..base.errors import ConfigError
from ..types import Fate
from .verl_config import run_config, value_at
from .verl_curriculum import Curriculum
from .verl_data import READ, VerlRows
from .verl_rollouts import Trajectory

try:
    import transfer_queue as tq
    import verl
    from datasets import Value
    from omegaconf import OmegaConf
    from torch.utils.data import get_worker_info
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils.dataset.rl_dataset import RLHFDataset
except ImportError as error:
    raise ImportError(
        f"winnow.integrations.verl needs verl 0.9 with its trainer ({error}); pip install 'verl[verl-core]==0.9.*'"
    ) from error
if not verl.__version__.startswith("0.9."):
    raise ImportError(f"winnow.integrations.verl needs verl 0.9, not {verl.__version__}; pip install 'verl==0.9.*'")

VISIT, SIZE = "winnow_visit", "__rollout_n__"
"""Columns of a row: the number of its visit, and verl's own group size of a prompt."""
FIELDS = (VISIT, "prompts", "responses", "response_mask", "rm_scores", "extra_fields")
"""What is read of a trajectory."""
WHERE = "pkg://winnow.integrations.verl"


class WinnowDataset(RLHFDataset):
    """verl's data set, whose training rows come in the order of Winnow's selector.

    The indices that verl's data loader draws decide only how many rows it gets, so `data.shuffle` has no effect. Derive
    from it for a data set of your own. Held-out rows are verl's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        buffer = WinnowReplayBuffer.latest
        if buffer is None:
            raise ConfigError(
                f"trainer.v1.sampler.custom_sampler: not set, or trainer.use_v1 is False; set path={WHERE} and "
                "name=WinnowReplayBuffer"
            )
        super().__init__(*args, **kwargs)
        self._buffer = buffer
        self._curriculum = buffer.attach(self) if buffer.curriculum is None else None

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the next rows to roll out, as many as `indices`; of held-out data those rows."""
        if self._curriculum is None:
            return [self[index] for index in indices]
        if get_worker_info() is not None:
            raise ConfigError("data.dataloader_num_workers: prompts are chosen in the trainer's process; set it to 0")
        rows = []
        for visit in self._curriculum.draw(len(indices), self._buffer.step):
            row = self[visit.prompt.ordinal]
            self._curriculum.launch(visit, int(row.get(SIZE, self._buffer.settings.num_generations)))
            rows.append(row | {VISIT: visit.number})
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return what verl's data loader saves; empty for held-out data."""
        return {} if self._curriculum is None else self._curriculum.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._curriculum is not None:
            self._curriculum.load_state_dict(state)


class WinnowReplayBuffer(ReplayBuffer):
    """verl's replay buffer, filter included, which reports every group to Winnow before verl trains on it or drops it.

    Raises ConfigError naming the key of what cannot work.
    """

    latest: ClassVar[WinnowReplayBuffer | None] = None
    """The last one built, to which the data sets that verl builds next belong."""

    def __init__(self, *, refill_fn: Any, sampler_kwargs: Any, **given: Any) -> None:
        trainer = getattr(refill_fn, "__self__", None)
        if trainer is None or not hasattr(trainer, "config"):
            raise ConfigError(
                f"trainer.v1.sampler.custom_sampler: refill_fn is no method of verl's trainer ({refill_fn!r:.80}); use "
                "verl's own PPOTrainer"
            )
        self._trainer: Any = trainer
        own = OmegaConf.to_container(OmegaConf.create(sampler_kwargs or {}), resolve=True)
        self.settings = run_config(trainer.config, own)
        self.curriculum: Curriculum | None = None
        """None until verl has built its training data."""
        self._failed = 0
        """Groups of this step without any trajectory."""
        super().__init__(refill_fn=refill_fn, sampler_kwargs=sampler_kwargs, **given, **self._as_verl_builds_its_own())
        WinnowReplayBuffer.latest = self

    def _as_verl_builds_its_own(self) -> dict[str, Any]:
        """Return the arguments that verl gives to its own buffer and not to a custom one: those of its filter."""
        trainer = self._trainer
        metric = trainer._resolve_filter_groups_metric()
        refills = bool(value_at(trainer.config, "trainer.v1.sampler.sync_refill_failed_groups"))
        size = value_at(trainer.config, "data.train_batch_size")
        fetched = value_at(trainer.config, "data.gen_batch_size") or size
        at_once = value_at(trainer.config, "algorithm.filter_groups.max_inflight_gen_batches") or 1
        return {
            "filter_groups_metric": metric,
            "sync_refill_failed_groups": refills,
            "train_batch_size": size,
            "gen_batch_size": 1 if metric is not None or refills else fetched,
            "max_inflight_gen_batches": 1 if metric is None else at_once,
        }

    def attach(self, data: WinnowDataset) -> Curriculum:
        """Make the curriculum of verl's training data."""
        config, rows = self._trainer.config, data.dataframe
        if VISIT in rows.column_names:
            raise ConfigError(f"data.train_files: column '{VISIT}' is Winnow's own; rename it")
        if data.prompt_key in rows.column_names:  # images are not read
            read = {data.prompt_key, *READ}
            kept = [name for name, kind in rows.features.items() if name in read or isinstance(kind, Value)]
            rows = rows.select_columns(kept)
        task = VerlRows(rows, data.prompt_key)
        epochs = len(task.train) // self.settings.prompts_per_step * (value_at(config, "trainer.total_epochs") or 1)
        steps = value_at(config, "trainer.total_training_steps") or max(1, epochs)
        self.settings = self.settings.model_copy(update={"max_steps": steps})
        path, name = (value_at(config, f"reward.custom_reward_function.{key}") for key in ("path", "name"))
        code = [f"{path}:{name}"] if path else []
        self.curriculum = Curriculum(self.settings, task, tokenizer=data.tokenizer, code=code)
        return self.curriculum

    @property
    def step(self) -> int:
        """Steps that verl has completed."""
        return int(self._trainer.global_steps) - 1

    # ---- what verl calls -----------------------------------------------------------------------------------------

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if self.curriculum is None:
            raise ConfigError(f"data.custom_cls: not a WinnowDataset; set path={WHERE} and name=WinnowDataset")
        if partition_id == "val":
            self.curriculum.complete()
            found: tuple[Any, dict[str, Any]] = super().sample(global_steps, partition_id, batch_size)
            return found
        self._failed = 0
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        warmup = value_at(self._trainer.config, "trainer.critic_warmup") or 0
        untrained = f"trainer.critic_warmup={warmup}: verl updates no actor yet" if global_steps < warmup else ""
        last = global_steps >= self._trainer.total_training_steps
        return batch, metrics | self.curriculum.finished(self._failed, untrained=untrained, last=last)

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        if partition_id != "val" and self.curriculum is not None:
            equal = {uid for uid in uids if self._dapo_classification_cache[partition_id].get(uid) is not None}
            why = f"algorithm.filter_groups: every {self.filter_groups_metric} of the group is equal"
            self._report(partition_id, equal, self.partitions[partition_id], Fate.FILTERED, why)
            why = "the batch was already full"
            self._report(partition_id, uids - equal, self.partitions[partition_id], Fate.SURPLUS, why)
        super()._clear_groups(partition_id, uids)

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        if partition_id != "val":
            unusable = self._report(partition_id, set(selected_prompt_uids), partition_snapshot)
            if unusable:
                tq.kv_clear(partition_id=partition_id, keys=sorted(unusable))
                partition_snapshot = {key: tag for key, tag in partition_snapshot.items() if key not in unusable}
        return super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)

    def _report(
        self, partition_id: str, uids: set[str], snapshot: Mapping[str, Any], fate: Fate | None = None, reason: str = ""
    ) -> set[str]:
        """Report groups to Winnow; return the keys of trajectories that failed: their reward cannot be used."""
        assert self.curriculum is not None
        keys = [key for key in snapshot if key.partition("_")[0] in uids]
        self._failed += len(uids - {key.partition("_")[0] for key in keys})
        trajectories = list(trajectories_of(keys, partition_id))
        groups = self.curriculum.returned(trajectories, fate, reason)
        failed = {(g.visit.number, r.sibling) for g in groups for r in g.rollouts if r.fate == Fate.FAILED}
        return {key for key, t in zip(keys, trajectories, strict=True) if (t.visit, t.sibling) in failed}


def trajectories_of(keys: list[str], partition_id: str) -> Iterator[Trajectory]:
    """Yield the trajectories of verl's queue with these keys, in order.

    Raises ConfigError if they have no reward, or no visit.
    """
    if not keys:
        return
    try:
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=list(FIELDS))
        columns = [list(data[name]) for name in FIELDS]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"verl's rollouts need the columns {', '.join(FIELDS)} ({error!s:.200}); rm_scores is missing when no "
            f"reward was computed, and {VISIT} when an agent loop drops the columns of its row"
        ) from error
    for key, visit, prompt, response, mask, scores, extra in zip(keys, *columns, strict=True):
        _, session, part = key.split("_")
        yield Trajectory(
            visit=int(_plain(visit)),
            sibling=int(session),
            part=int(part),
            prompt_ids=tuple(_numbers(prompt).tolist()),
            token_ids=_numbers(response).astype(np.int64),
            mask=_numbers(mask).astype(bool),
            reward=float(_numbers(scores).sum()),
            scores=_scores(_plain(extra)),
        )


def _plain(value: Any) -> Any:
    """Return a value without the wrapper that tensordict gives to what is no tensor."""
    return value.data if type(value).__name__ == "NonTensorData" else value


def _numbers(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())


def _scores(extra: Any) -> Mapping[str, Any]:
    scores = extra.get("reward_extra_info") if isinstance(extra, Mapping) else None
    return scores if isinstance(scores, Mapping) else {}
