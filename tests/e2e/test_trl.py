"""Winnow inside TRL, which really runs: the batch it trains on, its account, resume, and what is refused."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from winnow import ConfigError
from winnow.integrations.trl import WinnowGRPOTrainer
from winnow.integrations.trl_config import methods_of
from winnow.record.ledger import Ledger
from winnow.record.records import RunDirectoryError
from winnow.record.stop_conditions import RunStoppedError, TaskSolvedError
from winnow.run.checkpoint import CheckpointError
from winnow.sampler.codec import group_state
from winnow.study.report import write_report
from winnow.types import Prompt, Visit

from ..builders.trl_runs import (
    PROMPTS,
    G,
    Watched,
    arguments,  # noqa: F401
    data,  # noqa: F401
    metrics,
    parity,
    proven,
    settings,
)
from ..unit.fake_samplers import group


def test_without_methods_the_batches_are_those_of_trl(arguments: dict[str, Any], tmp_path: Path) -> None:
    """TRL's own advantages, tensors and token counts of the same rows come back unchanged."""

    class Compared(WinnowGRPOTrainer):
        def _rolled_out(self, *args: Any) -> Any:
            found = super()._rolled_out(*args)
            self.own = {k: v.clone() for k, v in found[0].items()}
            return found

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            assert set(output) - {"winnow_rows"} == set(self.own)
            for key in self.own:
                value = output[key]
                torch.testing.assert_close(value, self.own[key], rtol=1e-4, atol=1e-4, msg=key)
            self.compared = getattr(self, "compared", 0) + 1
            return output

    for loss_type in ("dapo", "grpo", "dr_grpo"):
        args = settings(tmp_path / loss_type, loss_type=loss_type)
        trainer = Compared(**arguments | {"args": args})
        trainer.train()
        assert trainer.compared == 4
        totals = proven(tmp_path / loss_type)
        assert totals["trained"]["rollouts"] == 4 * G * PROMPTS


def test_full_batches_of_groups_that_teach(arguments: dict[str, Any], tmp_path: Path) -> None:
    methods = {"selector": "greso", "audit": {"epsilon": 0.2}}
    trainer = Watched(**arguments, **methods, filter="zero_variance", advantage="rloo")
    trainer.train()
    for batch in trainer.seen:
        assert batch["advantages"].shape == (G * PROMPTS,)
        groups = batch["advantages"].view(PROMPTS, G)
        assert (groups.abs().sum(1) > 0).all()
        torch.testing.assert_close(groups.sum(1), torch.zeros(PROMPTS), atol=1e-5, rtol=0)
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
        prompts = [
            tuple(ids[mask.bool()].tolist())
            for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        assert all(len(set(prompts[i * G : (i + 1) * G])) == 1 for i in range(PROMPTS))
    totals = proven(tmp_path / "out")
    assert totals["trained"]["rollouts"] == 4 * G * PROMPTS
    assert totals["filtered"]["rollouts"] > 0
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(np.isfinite(line["loss"]) and line["groups/effective"] == PROMPTS for line in lines)
    assert lines[-1]["num_tokens"] == totals["trained"]["tokens"] + totals["filtered"]["tokens"]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_what_a_filter_drops_without_refill_has_no_part_in_the_loss(
    loss_type: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """The gradient is that of TRL on the rows left alone, in micro-batches of which the last has empty rows."""
    parts = 8
    cut = {"gradient_accumulation_steps": parts, "per_device_train_batch_size": G * PROMPTS // parts}
    args = settings(tmp_path / "out", loss_type=loss_type, max_steps=1, **cut)
    dropping = {"name": "zero_variance", "refill": False}
    trainer = Watched(**arguments | {"args": args}, filter=dropping, advantage="dr_grpo")
    trainer.train()
    (batch,) = trainer.seen
    full = batch["completion_mask"].sum(1) > 0
    assert 0 < full.sum() < G * PROMPTS
    assert full.sum() % G == 0
    assert len(full) == -(-int(full.sum()) // parts) * parts

    def gradient(parts: int, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        args = settings(tmp_path / "plain", loss_type=loss_type, gradient_accumulation_steps=parts)
        plain = GRPOTrainer(**arguments | {"args": args})
        plain.current_gradient_accumulation_steps = parts
        plain.model.train()
        for part in split_tensor_dict(batch, parts):
            plain.compute_loss(plain.model, part).backward()
        return torch.cat([p.grad.flatten() for p in plain.model.parameters() if p.grad is not None])

    left = {k: v[full] if v.dim() else v for k, v in batch.items()}
    if loss_type != "dapo":
        left["advantages"] = left["advantages"] * float(full.sum()) / len(full)
    torch.testing.assert_close(gradient(parts, batch), gradient(1, left), rtol=1e-4, atol=1e-7)


def test_a_resumed_run_goes_on_with_its_account(arguments: dict[str, Any], tmp_path: Path) -> None:
    methods = {"selector": "greso", "filter": "zero_variance"}
    first = settings(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=2)
    WinnowGRPOTrainer(**arguments | {"args": first}, **methods).train()
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "winnow.json").read_text())
    assert state["loop"]["step"] == 2
    longer = settings(tmp_path / "out", max_steps=4, save_strategy="steps", save_steps=2)
    trainer = WinnowGRPOTrainer(**arguments | {"args": longer}, **methods)
    trainer.train(resume_from_checkpoint=True)
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    seconds = [line["seconds_total"] for line in lines]
    assert seconds == sorted(seconds), "it goes on counting"
    assert all(line["seconds/generate/waiting"] > 0 for line in lines)
    assert not any("num_computed_tokens" in line or "num_decoded_tokens" in line for line in lines), "TRL generates"
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 4 * G * PROMPTS
    with pytest.raises(RunDirectoryError, match=r"saved with other filter \(.+, now .+\); go on with the same"):
        WinnowGRPOTrainer(**arguments | {"args": longer}, selector="greso").train(resume_from_checkpoint=True)
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        WinnowGRPOTrainer(**arguments | {"args": longer}, **methods).train()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("offsets", None, "offsets"),
        ("loop", {"step": 2, "in_flight": [], "visits": 3}, r"loop\.num_tokens: Field required"),
    ],
)
def test_a_state_of_another_program_is_refused(
    arguments: dict[str, Any], tmp_path: Path, key: str, value: Any, said: str
) -> None:
    first = settings(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    WinnowGRPOTrainer(**arguments | {"args": first}, selector="greso").train()
    file = tmp_path / "out" / "checkpoint-1" / "winnow.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    longer = settings(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    with pytest.raises(CheckpointError, match=rf"winnow\.json: not what this version saves.*({said})"):
        WinnowGRPOTrainer(**arguments | {"args": longer}, selector="greso").train(resume_from_checkpoint=True)
    file.write_text(file.read_text()[:-9])
    with pytest.raises(CheckpointError, match=r"winnow\.json: damaged .*; resume from another checkpoint"):
        WinnowGRPOTrainer(**arguments | {"args": longer}, selector="greso").train(resume_from_checkpoint=True)


def test_groups_that_wait_are_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    """TRL trains every batch at once, so nothing of ours does; their tokens would be looked at by nobody."""
    first = settings(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    WinnowGRPOTrainer(**arguments | {"args": first}).train()
    file = tmp_path / "out" / "checkpoint-1" / "winnow.json"
    state = json.loads(file.read_text())
    state["loop"]["waiting"] = [group_state(group(Visit(0, 0, Prompt("p", 0, text="1"))))]
    file.write_text(json.dumps(state))
    longer = settings(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    with pytest.raises(CheckpointError, match=r"winnow\.json: not what this version saves.*groups wait in this state"):
        WinnowGRPOTrainer(**arguments | {"args": longer}).train(resume_from_checkpoint=True)


def test_several_updates_on_a_batch(arguments: dict[str, Any], tmp_path: Path) -> None:
    args = settings(
        tmp_path / "out", max_steps=8, num_iterations=2, gradient_accumulation_steps=1, steps_per_generation=2
    )
    trainer = WinnowGRPOTrainer(**arguments | {"args": args}, filter="zero_variance", advantage="rloo")
    trainer.train()
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2]
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 2 * 2 * G * PROMPTS


def test_the_page(arguments: dict[str, Any], tmp_path: Path) -> None:
    WinnowGRPOTrainer(**arguments, filter="zero_variance").train()
    page = tmp_path / "page.html"
    write_report([tmp_path / "out" / "winnow"], page)
    assert "zero_variance" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("reward", "error"), [(0.0, RunStoppedError), (1.0, TaskSolvedError)])
def test_prompts_that_never_teach_end_the_run(
    arguments: dict[str, Any], tmp_path: Path, reward: float, error: type[Exception]
) -> None:
    always = {"reward_funcs": lambda completions, **columns: [reward] * len(completions)}
    with pytest.raises(error, match=r"had no signal|solved"):
        WinnowGRPOTrainer(**arguments | always, filter="zero_variance").train()
    with Ledger.open(tmp_path / "out" / "winnow" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok


def test_what_was_collected_before_a_stop_is_trained(arguments: dict[str, Any], tmp_path: Path) -> None:
    """And saved. One prompt of the first generation teaches and none ever after: a batch of one group, then the end."""
    calls = []

    def once(completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        return [float(len(calls) == 1 and i == 0) for i in range(len(completions))]

    trainer = Watched(**arguments | {"reward_funcs": once}, filter="zero_variance", advantage="rloo")
    with pytest.raises(RunStoppedError, match=r"had no signal.*; the model is saved in .*checkpoint-1"):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-1" / "winnow.json").is_file()
    (batch,) = trainer.seen
    assert (batch["completion_mask"].sum(1) > 0).sum() == G
    assert trainer.state.global_step == 1
    with Ledger.open(tmp_path / "out" / "winnow" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        assert ledger.totals()["trained"]["rollouts"] == G


@pytest.mark.slow
@pytest.mark.parametrize(("good", "error"), [(5, "the model is saved in"), (6, "^(?!.*is saved in)")])
def test_a_stop_behind_the_short_update_of_an_epoch(
    arguments: dict[str, Any], tmp_path: Path, good: int, error: str
) -> None:
    """An epoch has ten micro-batches, so updates of 4, 4, 2, 4 ... A stop between two updates saves."""
    calls = []

    def until(completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        return [float(len(calls) <= good and i % 2) for i in range(len(completions))]

    args = settings(
        tmp_path / "out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        steps_per_generation=2,
        max_steps=30,
    )
    more = {"args": args, "reward_funcs": until, "train_dataset": arguments["train_dataset"].select(range(20))}
    trainer = WinnowGRPOTrainer(**arguments | more, filter="zero_variance")
    with pytest.raises(RunStoppedError, match=error):
        trainer.train()
    assert trainer.state.global_step == 3
    assert (tmp_path / "out" / "checkpoint-3").exists() == (good == 5)


def test_one_prompt_a_batch_does_not_end_after_ten_groups(arguments: dict[str, Any], tmp_path: Path) -> None:
    """As by TRL's defaults: a pass over the prompts without a signal ends the run."""
    calls = []

    def rarely(completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        return [float(len(calls) == 13 and i == 0) for i in range(len(completions))]

    args = settings(tmp_path / "out", per_device_train_batch_size=G)
    trainer = WinnowGRPOTrainer(**arguments | {"args": args, "reward_funcs": rarely}, filter="zero_variance")
    with pytest.raises(RunStoppedError, match=r"24 groups in a row had no signal \(max_refill_rounds=10, and at least"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert len(calls) == 13 + 24


def test_a_completion_without_any_reward_is_no_zero(arguments: dict[str, Any], tmp_path: Path) -> None:
    def some(completions: list[str], row: list[int], **columns: Any) -> list[float | None]:
        return [None if k % G == 1 else r for k, r in enumerate(parity(completions, row))]

    WinnowGRPOTrainer(**arguments | {"reward_funcs": some}, filter="zero_variance").train()
    totals = proven(tmp_path / "out")
    assert totals["failed"]["rollouts"] >= 4 * PROMPTS
    assert totals["trained"]["rollouts"] == 4 * PROMPTS * (G - 1)


@pytest.mark.parametrize(
    ("methods", "args", "message"),
    [
        ({"selector": "gresso"}, {}, "Did you mean 'greso'"),
        ({"selector": {"name": "pass_rate", "refresh_steps": 5}}, {}, "make a profile with `winnow pass-rates`"),
        ({"advantage": "otb"}, {}, "which TRL's forward pass does not return"),
        ({"advantage": "opob"}, {"num_iterations": 2}, "opob computes its baseline once per generation batch"),
        ({"advantage": "opob"}, {"beta": 0.1}, "set beta: 0"),
        ({"step_scale": "ess"}, {}, "step_scale: has no effect here"),
        ({"step_scale": "ess", "engine": "local"}, {"top_p": 0.9}, "apply temperature only"),
        ({"gates": ["arrol"]}, {"repetition_penalty": 1.1}, "repetition_penalty: does not work with gates"),
        ({"gates": [{"name": "divergence", "k": 1}]}, {}, "so no rollout runs then"),
        ({"gates": ["arrol"]}, {"loss_type": "bnpo"}, "bnpo weighs micro-batches alike"),
        ({"env": "countdown"}, {}, "give one of the two"),
        ({"selectr": "greso"}, {}, "Did you mean 'selector'"),
        ({"engine": True}, {}, "engine: expected a name or {name: ..., options}, not True"),
        ({"advantage": ["grpo"]}, {}, "advantage: expected a name or"),
        ({"advantage": "remax"}, {}, "TRL samples all alike"),
        ({"filter": "zero_variance", "rollout_batch": "adaptive"}, {}, "surplus: carry trains groups one step after"),
        (
            {"filter": {"name": "zero_variance", "refill": False}},
            {"loss_type": "bnpo"},
            "bnpo weighs micro-batches alike",
        ),
        ({"filter": "zero_variance"}, {"scale_rewards": "batch"}, "scale_rewards: batch would divide each round"),
        ({"advantage": "grpo"}, {"scale_rewards": "none"}, "scale_rewards: none has no effect with an advantage"),
        ({"advantage": "rloo"}, {"multi_objective_aggregation": "normalize_then_sum"}, "use the weighted sum"),
        ({"selector": "greso"}, {"multi_objective_aggregation": "normalize_then_sum"}, "finds a signal in groups"),
        ({"filter": "zero_variance"}, {"multi_objective_aggregation": "normalize_then_sum"}, "use sum_then_normalize"),
        ({"success": "env"}, {}, "'env' is the reward of an environment, and this task has none"),
        ({"advantage": "opob"}, {"use_adaptive_entropy": True}, "leave out use_adaptive_entropy"),
        ({"advantage": "opob"}, {"top_entropy_quantile": 0.2}, "ignores top_entropy_quantile"),
        ({"advantage": "opob"}, {"off_policy_mask_threshold": 0.1}, "uses a sign that its baseline decides"),
        (
            {"advantage": "opob"},
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "use_reentrant gives no gradient of a single rollout",
        ),
    ],
)
def test_refusals(
    methods: dict[str, Any], args: dict[str, Any], message: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    given = arguments | {"args": settings(tmp_path / "out", **args)}
    with pytest.raises(ConfigError, match=message):
        WinnowGRPOTrainer(**given, **methods)


def test_opob_is_refused_under_fp16(arguments: dict[str, Any]) -> None:
    trainer = WinnowGRPOTrainer(**arguments, advantage="opob")
    trainer.args.fp16 = True  # which accelerate refuses on a CPU
    with pytest.raises(ConfigError, match="fp16: norms of gradients"):
        methods_of(trainer, trainer._winnow.config, trainer._task, by_engine=False, own_advantages=True)


def test_trls_table_has_the_advantages_that_were_trained_on(arguments: dict[str, Any]) -> None:
    trainer = Watched(**arguments, advantage="rloo")
    trainer.train()
    assert list(trainer._logs["advantages"]) == pytest.approx(trainer.seen[-1]["advantages"].tolist())


def test_the_docs_name_every_refusal() -> None:
    """The key that each error of these files begins with."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "trl.md").read_text(encoding="utf-8")
    keys = set()
    for file in sorted((root / "src" / "winnow" / "integrations").glob("trl*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise | ast.Yield):
                continue
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            keys.update(match[1] for text in texts[:1] if (match := re.match(r"(\w+): ", text)))
    assert {"advantage", "loss_type", "scale_rewards", "multi_objective_aggregation", "step_scale"} <= keys
    assert [key for key in sorted(keys) if f"`{key}" not in page] == []
    for key in ("use_vllm", "tools", "environment_factory", "rollout_func", "repetition_penalty", "generation_kwargs"):
        assert f"`{key}`" in page
