"""Winnow's selectors and account inside verl's own trainer, data loader, replay buffer, queue and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
import transfer_queue as tq
from omegaconf import OmegaConf

from winnow.base.errors import ConfigError
from winnow.integrations.verl import WinnowDataset, WinnowReplayBuffer
from winnow.integrations.verl_data import VerlRows
from winnow.record.ledger import Ledger
from winnow.record.records import RunDirectoryError
from winnow.record.stop_conditions import RunStoppedError

from ..builders.commands import winnow
from ..builders.runs import metrics_of
from ..builders.tokenizers import chat_model
from ..builders.verl_runs import Rollouts, config_of, ordinals_of, run, settings_of_the_page
from ..builders.verl_steps import PROMPTS, G, rows

__all__ = ["chat_model"]  # a fixture
OWN = "+trainer.v1.sampler.sampler_kwargs"


@pytest.fixture(scope="module", autouse=True)
def queue() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


def account(tmp_path: Path) -> tuple[dict[str, dict[str, float]], str, bool]:
    with Ledger.open(tmp_path / "checkpoints" / "winnow" / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems
        return ledger.totals(), ledger.digest(), proof.finished


def test_the_page_says_three_lines() -> None:
    assert len(settings_of_the_page()) == 6


def test_a_run_with_the_settings_of_the_page(chat_model: Path, tmp_path: Path) -> None:
    rollouts = Rollouts()
    trainer = run(config_of(tmp_path, chat_model, ["trainer.total_training_steps=12"]), rollouts)
    assert isinstance(trainer.replay_buffer, WinnowReplayBuffer)
    assert isinstance(trainer.train_dataset, WinnowDataset)
    assert [len(ordinals_of(rollouts, step)) for step in range(1, 13)] == [PROMPTS] * 12
    assert [len(keys) for keys in trainer.trained] == [PROMPTS * G] * 12
    totals, _, finished = account(tmp_path)
    assert finished, "verl saves at the last step"
    assert totals["trained"]["rollouts"] == 12 * PROMPTS * G
    assert totals["trained"]["tokens"] == 12 * PROMPTS * (3 + 4 + 5 + 6)
    assert totals["skipped"]["visits"] > 0
    assert totals["failed"]["rollouts"] == 0
    lines = metrics_of(tmp_path / "checkpoints" / "winnow")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[0]["rewards/acc/mean"] == 1
    logged = [line["winnow/reward"] for line in trainer.logged]
    assert logged == pytest.approx([line["reward"] for line in lines])
    where = str(tmp_path / "checkpoints" / "winnow")
    assert "OK: exactly-once accounting holds" in winnow("verify", where).output
    assert winnow("report", where, "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert "Base probabilities of GRESO" in page
    assert any(prompt.id in page for prompt in VerlRows(rows()).train)


@pytest.mark.parametrize("selector", ["greso", "backoff", "thompson", "bayes"])
def test_a_killed_run_resumes_from_verls_checkpoint(selector: str, chat_model: Path, tmp_path: Path) -> None:
    own, found = [f"{OWN}.audit.epsilon=0.2"], []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        overrides = ["trainer.total_training_steps=10", *settings_with(selector), *own]
        config = config_of(tmp_path / name, chat_model, overrides)
        rollouts = Rollouts()
        if name == "killed":
            run(config, rollouts, dies_at=6)  # its last checkpoint is of step 4
            assert not account(tmp_path / name)[2]
            rollouts.asked = [(step, index) for step, index in rollouts.asked if step <= 4]
            config = config_of(tmp_path / name, chat_model, overrides)
        run(config, rollouts)
        totals, digest, finished = account(tmp_path / name)
        assert finished
        found.append((digest, rollouts.asked))
    assert found[0] == found[1]
    assert totals["void"]["visits"] >= 2 * PROMPTS


def settings_with(selector: str) -> list[str]:
    """Overrides that replace the page's selector."""
    return [f"trainer.v1.sampler.sampler_kwargs.selector={selector}"]


def test_failed_sessions_and_groups(chat_model: Path, tmp_path: Path) -> None:
    rollouts = Rollouts(fails=lambda index, session, step: index == 3 or (index == 6 and session == 1))
    trainer = run(config_of(tmp_path, chat_model, ["trainer.total_training_steps=4"]), rollouts)
    totals, _, _ = account(tmp_path)
    assert totals["failed"]["rollouts"] == G + 1
    assert totals["trained"]["rollouts"] == 4 * PROMPTS * G - G - 1 == sum(map(len, trainer.trained))
    lines = metrics_of(tmp_path / "checkpoints" / "winnow")
    assert sum(line["rollouts/failed_share"] for line in lines) * PROMPTS * G == pytest.approx(G + 1)


def test_failed_groups_that_verl_replaces(chat_model: Path, tmp_path: Path) -> None:
    rollouts = Rollouts(fails=lambda index, session, step: index == 3)
    refill = ["trainer.v1.sampler.sync_refill_failed_groups=True", "trainer.total_training_steps=5"]
    trainer = run(config_of(tmp_path, chat_model, refill), rollouts)
    assert [len(keys) for keys in trainer.trained] == [PROMPTS * G] * 5
    totals, _, _ = account(tmp_path)
    failed = sum(index == 3 for _, index in rollouts.asked)
    assert totals["failed"]["rollouts"] == failed * G > 0
    assert totals["trained"]["visits"] == 5 * PROMPTS == len(rollouts.asked) - failed


def test_a_reward_that_is_not_finite_is_left_out_of_the_batch(chat_model: Path, tmp_path: Path) -> None:
    rollouts = Rollouts(reward=lambda index, session, step: float("nan") if session == 2 else float(session == 0))
    trainer = run(config_of(tmp_path, chat_model, ["trainer.total_training_steps=2"]), rollouts)
    assert all(key.split("_")[1] != "2" for keys in trainer.trained for key in keys)
    totals, _, _ = account(tmp_path)
    assert (totals["failed"]["rollouts"], totals["trained"]["rollouts"]) == (2 * PROMPTS, 2 * PROMPTS * (G - 1))
    bad = config_of(tmp_path, chat_model, [f"trainer.default_local_dir={tmp_path / 'bad'}"])
    with pytest.raises(RunStoppedError, match="no rollout of the batch has a reward"):
        run(bad, Rollouts(reward=lambda *_: float("inf")))


def test_verls_own_filter(chat_model: Path, tmp_path: Path) -> None:
    filters = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]
    rollouts = Rollouts()
    trainer = run(config_of(tmp_path, chat_model, [*filters, "trainer.total_training_steps=5"]), rollouts)
    assert [len(keys) for keys in trainer.trained] == [PROMPTS * G] * 5
    totals, _, finished = account(tmp_path)
    assert finished
    assert totals["filtered"]["visits"] > 0
    assert totals["trained"]["visits"] == 5 * PROMPTS
    booked = sum(totals[fate]["visits"] for fate in ("trained", "filtered", "surplus"))
    assert booked == len(rollouts.asked)
    lines = metrics_of(tmp_path / "checkpoints" / "winnow")
    assert sum(line["groups/rolled_out"] for line in lines) == booked
    assert all(line["groups/effective"] == PROMPTS for line in lines)


def test_sizes_of_single_prompts(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = WinnowDataset.__getitem__
    monkeypatch.setattr(WinnowDataset, "__getitem__", lambda self, i: own(self, i) | {"__rollout_n__": 2 + i % 2})
    rollouts = Rollouts()
    run(config_of(tmp_path, chat_model, ["trainer.total_training_steps=4"]), rollouts)
    totals, _, _ = account(tmp_path)
    assert totals["failed"]["rollouts"] == 0
    assert totals["trained"]["rollouts"] == sum(2 + index % 2 for _, index in rollouts.asked)


# ------------------------------------------------------------ what is refused


def test_one_object_without_the_other(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WinnowReplayBuffer, "latest", None)
    alone = "trainer.v1.sampler.custom_sampler.path=null"
    with pytest.raises(ConfigError, match=r"trainer\.v1\.sampler\.custom_sampler: not set"):
        run(config_of(tmp_path, chat_model, [alone]))
    with pytest.raises(ConfigError, match=r"data\.custom_cls\.path: not set"):
        run(config_of(tmp_path, chat_model, ["data.custom_cls.path=null"]))
    theirs = ["data.custom_cls.path=pkg://verl.utils.dataset.rl_dataset", "data.custom_cls.name=RLHFDataset"]
    with pytest.raises(ConfigError, match=r"data\.custom_cls: not a WinnowDataset"):
        run(config_of(tmp_path, chat_model, theirs))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.dataloader_num_workers=8", r"data\.dataloader_num_workers: 8 workers"),
        ("trainer.v1.trainer_mode=colocate_async", r"trainer\.v1\.trainer_mode: colocate_async"),
        ("trainer.v1.sampler.sampler_kwargs.selector=gresso", r"unknown name 'gresso'\. Did you mean 'greso'"),
        (f"{OWN}.selctor=greso", r"no setting 'selctor'\. Did you mean 'selector'"),
        ("data.train_batch_size=64", r"data\.train_files: 12 prompts, but a batch has 64"),
        ("data.prompt_key=question", r"no column 'question'.*set data\.prompt_key"),
        ("algorithm.adv_estimator=gae", r"algorithm\.adv_estimator: gae"),
    ],
)
def test_settings_that_cannot_work(override: str, message: str, chat_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(config_of(tmp_path, chat_model, [override]))
    assert not (tmp_path / "checkpoints" / "winnow").exists()


def test_resumes_that_cannot_go_on(chat_model: Path, tmp_path: Path) -> None:
    steps = ["trainer.total_training_steps=2"]
    run(config_of(tmp_path, chat_model, steps))

    def refused(message: str, *overrides: str, **changes: Any) -> None:
        more = ["trainer.total_training_steps=4", *overrides]
        with pytest.raises(RunDirectoryError, match=message):
            run(config_of(tmp_path, chat_model, more, **changes))

    refused(r"data\.pt: saved with other selector \(greso, now bayes\)", *settings_with("bayes"))
    refused(r"data\.pt: saved with other data\.train_files", rows=15)
    refused(r"already holds a run", "trainer.resume_mode=disable")
    run(config_of(tmp_path, chat_model, ["trainer.total_training_steps=4"]))
    assert len(metrics_of(tmp_path / "checkpoints" / "winnow")) == 4


def test_a_reward_that_is_missing(chat_model: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, chat_model, ["trainer.val_before_train=False"])
    with pytest.raises(ConfigError, match="rm_scores is missing when no reward was computed"):
        run(config, Rollouts(reward=lambda *_: None))
