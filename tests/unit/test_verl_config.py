"""verl's settings and rows: what Winnow takes of them, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from winnow.base.errors import ConfigError
from winnow.env.dataset import DatasetConfig
from winnow.env.row_files import DataError
from winnow.integrations.verl_config import KWARGS, SETTINGS, run_config
from winnow.integrations.verl_data import VerlRows
from winnow.methods.pass_rates import PassRate

from ..builders.verl_steps import curriculum_of, row, rows, settings_of_verl

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"selector": "gresso"}, r"selector: unknown name 'gresso'\. Did you mean 'greso'"),
    ({}, {"selctor": "greso"}, r"sampler_kwargs: no setting 'selctor'\. Did you mean 'selector'"),
    ({}, {"filter": "zero_variance"}, r"no setting 'filter'"),
    ({}, {"selector": {"name": "greso", "targt": 1}}, r"unknown option 'targt'\. Did you mean 'target'"),
    ({}, {"selector": {"name": "pass_rate", "refresh_steps": 5}}, r"refresh_steps"),
    ({}, {"seed": -1}, r"sampler_kwargs: seed: .*greater than or equal to 0 \(got -1\)"),
    ({"trainer__v1__trainer_mode": "separate_async"}, {}, r"trainer\.v1\.trainer_mode: separate_async"),
    ({"data__dataloader_num_workers": 8}, {}, r"data\.dataloader_num_workers: 8 workers"),
    ({"data__custom_cls__path": None}, {}, r"data\.custom_cls\.path: not set"),
    ({"actor_rollout_ref__rollout__n": 1}, {}, r"actor_rollout_ref\.rollout\.n: 1 rollouts"),
    ({"trainer__v1__sync__parameter_sync_step": 2}, {}, r"parameter_sync_step: 2"),
    ({"skip__rollout_tq__enable": True}, {}, r"skip\.rollout_tq\.enable"),
    ({"reward__reward_model__enable": True}, {}, r"reward\.reward_model\.enable_resource_pool=True"),
    ({"algorithm__adv_estimator": "gae"}, {"selector": "greso"}, r"algorithm\.adv_estimator: gae .*selector=uniform"),
    ({"algorithm__adv_estimator": "remax"}, {"selector": "bayes"}, r"algorithm\.adv_estimator: remax"),
    ({"algorithm__adv_estimator": "mine"}, {"selector": "bayes"}, r"algorithm\.adv_estimator: mine may let groups"),
    ({"algorithm__use_kl_in_reward": True}, {"selector": "greso"}, r"use_kl_in_reward: True .*use_kl_in_reward=False"),
    ({"distillation__enabled": True}, {"selector": "thompson"}, r"distillation\.enabled: True .*selector: thompson"),
]


@pytest.mark.parametrize(("verl", "own", "message"), REFUSED, ids=lambda value: None)
def test_settings_that_cannot_work(verl: dict[str, Any], own: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(settings_of_verl(tmp_path, **verl), own)


def test_the_page_names_every_refusal() -> None:
    """The key of verl that an error begins with, and each of Winnow's settings."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "verl.md").read_text(encoding="utf-8")
    texts = [file.read_text(encoding="utf-8") for file in (root / "src/winnow/integrations").glob("verl*.py")]
    keys = {key for text in texts for key in re.findall(r'"(\w+(?:\.\w+)+): ', text)}
    assert {"data.dataloader_num_workers", "skip.rollout_tq.enable", "data.train_files"} <= keys
    assert [key for key in sorted(keys) if f"`{key}" not in page] == []
    assert [setting for setting in SETTINGS if f"| `{setting}` |" not in page] == []


def test_settings_that_can(tmp_path: Path) -> None:
    for estimator in ("rloo", "grpo_vectorized", "gpg", "opo"):
        verl = settings_of_verl(tmp_path, algorithm__adv_estimator=estimator)
        assert run_config(verl, {"selector": "greso"}).selector == "greso"
    verl = settings_of_verl(tmp_path, algorithm__adv_estimator="gae", data__seed=None)
    c = run_config(verl, {"output_dir": str(tmp_path / "else")})
    assert (c.seed, c.selector, c.output_dir) == (0, "uniform", str(tmp_path / "else"))
    assert KWARGS == "trainer.v1.sampler.sampler_kwargs"


def test_fewer_prompts_than_a_batch(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train_files: 2 prompts, but a batch has 3 \(data\.train_batch_size\)"
    ):
        curriculum_of(tmp_path, rows(2))


def test_rows_without_a_prompt() -> None:
    with pytest.raises(DataError, match=r"data\.train_files, row 2: no column 'prompt' .*set data\.prompt_key"):
        VerlRows([row(0), {"question": "x"}])
    with pytest.raises(DataError, match=r"row 1: 'prompt' must be text or messages, not \[\]"):
        VerlRows([{"prompt": []}])
    task = VerlRows([{"question": "x"}, {"question": "x"}], "question")
    assert len({prompt.id for prompt in task.train}) == 2


def test_a_profile_of_pass_rates_has_the_ids_of_the_rows(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows()))
    profiled = DatasetConfig(path=str(tmp_path / "train.jsonl"), preset="verl").build().train
    lines = [PassRate(prompt.id, 4, 2 * (n % 2), 0.0).line() for n, prompt in enumerate(profiled)]
    (tmp_path / "rates.jsonl").write_text("\n".join(lines))
    selector = {"name": "pass_rate", "profile": str(tmp_path / "rates.jsonl")}
    visits = curriculum_of(tmp_path, selector=selector).draw(6, 0)
    assert {visit.prompt.ordinal % 2 for visit in visits} == {1}


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": None}}


@pytest.mark.parametrize(
    "more",
    [
        {"id": "x1"},
        {"id": 7},
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": json.dumps(row(0)["prompt"])},
        {"prompt": "2 + 2 =", "tools": [TOOL]},
    ],
    ids=str,
)
def test_ids_are_those_of_winnow_pass_rates(more: dict[str, Any], tmp_path: Path) -> None:
    data = [row(0) | more, row(1)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in data))
    profiled = DatasetConfig(path=str(tmp_path / "train.jsonl"), preset="verl").build().train
    assert [prompt.id for prompt in VerlRows(data).train] == [prompt.id for prompt in profiled]


def test_columns_that_are_no_ids_and_no_tools() -> None:
    """verl does not read them, so they are no error."""
    plain = VerlRows(rows(1)).train[0].id
    for more in (
        {"id": 1.5},
        {"id": True},
        {"id": ""},
        {"tools": [{"no": "name"}]},
        {"chat_template_kwargs": "not JSON"},
    ):
        assert VerlRows([row(0) | more]).train[0].id == plain


def test_numbers_of_repeated_ids_leave_the_ids_of_other_rows() -> None:
    data = [row(n) | {"id": own} for n, own in enumerate(["a", "a", "a-2", "a"])]
    assert [prompt.id for prompt in VerlRows(data).train] == ["a", "a-3", "a-2", "a-4"]


@pytest.mark.parametrize("by", ["difficulty", "level"])
def test_an_order_by_a_column(by: str, tmp_path: Path) -> None:
    data = [row(n) | {"difficulty": 12 - n, "extra_info": {"level": -n}, "images": [n]} for n in range(12)]
    visits = curriculum_of(tmp_path, data, selector={"name": "ordered", "by": by}).draw(3, 0)
    assert [visit.prompt.ordinal for visit in visits] == [11, 10, 9]
    task = VerlRows(data)
    assert set(task.train[0].columns) == {"data_source", "reward_model", "difficulty", "level"}
    assert task.fingerprint() == VerlRows(rows()).fingerprint(), "they identify no prompt"
