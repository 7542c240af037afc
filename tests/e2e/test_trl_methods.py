"""Methods inside TRL that reach into generation or the update: gates, environments, Adaptive-K, OPOB, the ESS rate."""

from __future__ import annotations

import importlib
import itertools
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from winnow import ConfigError
from winnow.env.base import StepResult
from winnow.integrations.trl import WinnowGRPOTrainer, env_reward
from winnow.methods.correct import effective_sample_size
from winnow.methods.gate.arrol.head import FILE
from winnow.record.records import GATE
from winnow.types import Prompt

from ..builders.pruning import PRUNING
from ..builders.tokenizers import chat_tokenizer, save_chat_model
from ..builders.trl_runs import PROMPTS, G, Watched, arguments, data, metrics, parity, proven, settings

__all__ = ["arguments", "data"]  # fixtures


def test_arrol_prunes_while_winnows_engine_samples(arguments: dict[str, Any], tmp_path: Path) -> None:
    """What is pruned is neither scored nor trained; prompts are tokenized as TRL does."""
    scored = []

    def counted(completions: list[str], **columns: Any) -> list[float]:
        scored.append(len(completions))
        return parity(completions, **columns)

    trainer = Watched(**arguments | {"reward_funcs": counted}, gates=[PRUNING])
    trainer.train()
    totals = proven(tmp_path / "out")
    assert totals["pruned"]["rollouts"] > 0
    assert sum(scored) == totals["trained"]["rollouts"] == sum(len(batch["advantages"]) for batch in trainer.seen)
    assert totals["trained"]["rollouts"] + totals["pruned"]["rollouts"] == 4 * G * PROMPTS
    texts = {tuple(trainer.processing_class(text=row["prompt"])["input_ids"]) for row in arguments["train_dataset"]}
    for batch in trainer.seen:
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True):
            assert tuple(ids[mask.bool()].tolist()) in texts
    logged = [line for line in trainer.state.log_history if "winnow/groups/effective" in line]
    assert [line["winnow/groups/effective"] for line in logged] == [PROMPTS] * 3  # the last one's comes after training


@dataclass
class Echo:
    """Two turns; an action is a number of words, and the reward whether both are the same."""

    said: list[str] = field(default_factory=list)

    def reset(self) -> str | None:
        return None

    def step(self, text: str) -> StepResult:
        self.said.append(str(len(text.split())))
        first = len(self.said) == 1
        return StepResult(" 3 4" if first else None, float(len({*self.said}) == 1), not first, action=self.said[-1])


class Twice:
    """A task of two turns on Countdown's words."""

    name, max_turns, max_turn_length = "twice", 2, 4
    stop: tuple[str, ...] = ()
    test: Sequence[Prompt] = ()
    reward_funcs: Sequence[Any] = ()
    train = tuple(Prompt(f"p{i}", i, text=f"{1 + i} 2 3") for i in range(6))

    def make_env(self, prompt: Prompt) -> Echo:
        return Echo()

    def fingerprint(self) -> str:
        return self.name


def test_a_reward_of_the_environments_that_nobody_asks_for(arguments: dict[str, Any], tmp_path: Path) -> None:
    task = Twice()
    task.rewards_itself = True  # type: ignore[attr-defined]
    given = arguments | {"train_dataset": None, "args": settings(tmp_path / "out")}
    with pytest.raises(ConfigError, match="reward_funcs: the environments of twice give a reward that is lost"):
        WinnowGRPOTrainer(**given, env=task)


def test_a_run_of_several_turns_writes_what_a_gate_would_have_gone_by(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    given = arguments | {"reward_funcs": env_reward, "train_dataset": None}
    args = settings(tmp_path / "out", max_completion_length=12, max_steps=1)
    WinnowGRPOTrainer(**given | {"args": args}, env=Twice()).train()
    assert (tmp_path / "out" / "winnow" / GATE).stat().st_size > 0


def test_rewards_of_several_turns(arguments: dict[str, Any], tmp_path: Path) -> None:
    """`success` may be the environment's; other functions read what the model said, without observations."""
    read: list[tuple[str, list[int]]] = []

    def reads(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        read.extend(zip(completions, completion_ids, strict=True))
        return [0.1] * len(completions)

    given = arguments | {"reward_funcs": [env_reward, reads], "train_dataset": None}
    args = settings(tmp_path / "out", max_completion_length=12, max_steps=2)
    WinnowGRPOTrainer(**given | {"args": args}, env=Twice(), selector="thompson", success="env").train()
    assert all(len(text.split()) <= len(ids) - 2 for text, ids in read), "an observation has two tokens"
    for row in metrics(tmp_path / "out"):
        assert row["rewards/env/mean"] == row["rewards/env_reward/mean"]
        assert "frac_zero_unknown" not in row


def test_the_divergence_gate_cuts_in_an_environment(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Its observations are no part of the loss, and cut groups none of a batch."""
    given = arguments | {"reward_funcs": env_reward, "train_dataset": None}
    gate = {"name": "divergence", "k": 1, "threshold": 0.3}
    trainer = Watched(
        **given | {"args": settings(tmp_path / "out", max_completion_length=12)}, env=Twice(), gates=[gate]
    )
    trainer.train()
    totals = proven(tmp_path / "out")
    assert totals["cut"]["rollouts"] > 0
    assert totals["trained"]["rollouts"] > 0
    for batch in trainer.seen:
        observed = (batch["tool_mask"] == 0) & batch["completion_mask"].bool()
        assert (observed.sum(1) == 2).all()
        assert batch["num_items_in_batch"] == (batch["completion_mask"] * batch["tool_mask"]).sum()


def test_a_probe_is_continued_where_it_has_a_signal(arguments: dict[str, Any], tmp_path: Path) -> None:
    size = {"name": "sequential", "probe": 2}
    with pytest.raises(ConfigError, match="group_size: TRL would compute advantages of each part of a group apart"):
        Watched(**arguments, group_size=size)
    trainer = Watched(**arguments, group_size=size, filter="zero_variance", advantage="rloo")
    trainer.train()
    assert {len(batch["advantages"]) for batch in trainer.seen} == {G * PROMPTS}
    with sqlite3.connect(tmp_path / "out" / "winnow" / "ledger.sqlite") as db:
        sizes = dict(db.execute("SELECT fate, group_concat(DISTINCT group_size) FROM outcomes GROUP BY fate"))
    assert sizes == {"trained": f"{G}", "filtered": "2"}
    proven(tmp_path / "out")


def test_a_group_goes_on_until_one_is_right(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Rewards are of parts of different sizes; a hard group may end with more siblings than `num_generations`."""
    size = {"name": "sequential", "probe": 2, "hard_size": 2 * G}
    Watched(**arguments, group_size=size, filter="zero_variance", advantage="rloo").train()
    with sqlite3.connect(tmp_path / "out" / "winnow" / "ledger.sqlite") as db:
        sizes = {n for (n,) in db.execute("SELECT DISTINCT group_size FROM outcomes")}
    assert sizes == {2, G, G + 2, 2 * G}  # a part is 2; `hard_size` is 2 G
    proven(tmp_path / "out")


def test_adaptive_k_doubles_the_groups(arguments: dict[str, Any], tmp_path: Path) -> None:
    """With TRL's own advantages, of groups of either size."""
    size = {"name": "adaptive_k", "tau": 0.1, "window": 1}
    trainer = Watched(**arguments, group_size=size)
    trainer.train()
    assert [len(batch["advantages"]) for batch in trainer.seen] == [G * PROMPTS, *[2 * G * PROMPTS] * 3]
    torch.testing.assert_close(
        trainer.seen[1]["advantages"].view(PROMPTS, 2 * G).sum(1), torch.zeros(PROMPTS), atol=1e-5, rtol=0
    )
    assert trainer.num_generations == G
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 7 * G * PROMPTS


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_opob_weighs_by_the_gradients_of_trls_loss(loss_type: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Sum over a group of |u|^2 times advantage is 0, with u from TRL's own loss of each row alone."""
    args = settings(tmp_path / "out", max_steps=1, loss_type=loss_type)
    trainer = Watched(**arguments | {"args": args}, filter="zero_variance", advantage="opob")
    trainer.train()
    (batch,) = trainer.seen
    plain = GRPOTrainer(**arguments | {"args": settings(tmp_path / "plain", loss_type=loss_type)})
    plain.current_gradient_accumulation_steps = 1
    plain.model.train()
    norms = []
    for i in range(G * PROMPTS):
        plain.model.zero_grad()
        row = {k: v[i : i + 1] if v.dim() else v for k, v in batch.items()}
        plain.compute_loss(plain.model, row | {"advantages": torch.ones(1)}).backward()
        norms.append(sum(float(p.grad.square().sum()) for p in plain.model.parameters() if p.grad is not None))
    advantages = batch["advantages"].view(PROMPTS, G)
    weighted = torch.tensor(norms).view(PROMPTS, G) * advantages
    torch.testing.assert_close(weighted.sum(1) / weighted.abs().sum(1), torch.zeros(PROMPTS), atol=1e-4, rtol=0)
    assert (advantages.mean(1).abs() > 1e-3).any(), "the mean reward would have done"
    torch.testing.assert_close(advantages.amax(1) - advantages.amin(1), torch.ones(PROMPTS))


def test_the_rate_of_a_step_follows_the_effective_sample_size(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Of the second update on a batch, which is no longer on policy; the rate is back at the schedule's afterwards."""
    rates: list[float] = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

        def on_step_end(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    class Measured(WinnowGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            there = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            width = inputs["completion_ids"].shape[1]
            with torch.no_grad():
                logp = self._get_per_token_logps_and_entropies(model, ids, there, width)[0]
            log_w = ((logp - inputs["old_per_token_logps"]) * inputs["completion_mask"]).sum(1)
            self.shares = [*getattr(self, "shares", []), effective_sample_size(log_w) / len(log_w)]
            return super()._compute_loss(model, inputs)

    args = settings(tmp_path / "out", num_iterations=2, max_steps=4, learning_rate=3e-2, lr_scheduler_type="constant")
    trainer = Measured(**arguments | {"args": args}, step_scale="ess")
    trainer.add_callback(Rates())
    trainer.train()
    before, after = rates[::2], rates[1::2]
    np.testing.assert_allclose(before, 3e-2 * np.sqrt(trainer.shares), rtol=1e-5)
    assert min(trainer.shares) < 0.98
    assert after == [3e-2] * 4
    (_, second) = metrics(tmp_path / "out")
    assert second["ess_ratio"] == pytest.approx(trainer.shares[-1], rel=1e-5)
    assert second["effective_learning_rate"] == pytest.approx(before[-1])


def test_adapters_are_merged_for_the_engine(arguments: dict[str, Any], tmp_path: Path) -> None:
    """The engine's first samples, and those after updates, are compared with TRL's model."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = WinnowGRPOTrainer(**arguments, engine="local", peft_config=lora, step_scale="ess", filter="zero_variance")
    trainer.train()
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-3 for line in lines)
    assert all(line["ess_ratio"] == pytest.approx(1, abs=1e-3) for line in lines)


def test_a_resumed_run_goes_on_with_its_gates(arguments: dict[str, Any], tmp_path: Path) -> None:
    methods: dict[str, Any] = {"gates": [PRUNING], "step_scale": {"name": "ess", "reference": "measured"}}
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = settings(tmp_path / "out", max_steps=2, **saving)
    WinnowGRPOTrainer(**arguments | {"args": first}, **methods).train()
    again = WinnowGRPOTrainer(**arguments | {"args": settings(tmp_path / "out", **saving)}, **methods)
    again.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2, 3, 4]
    proven(tmp_path / "out")
    before, after = (
        json.loads((tmp_path / "out" / f"checkpoint-{step}" / "winnow.json").read_text())["loop"] for step in (2, 4)
    )
    assert after["gates"]["arrol"]["steps"] == before["gates"]["arrol"]["steps"] + 2
    assert after["step_scale"] == before["step_scale"] != {"seen": []}
    assert (tmp_path / "out" / "checkpoint-4" / FILE).is_file()


OPTIONS: dict[str, list[Any]] = {
    "selector": ["uniform", "greso", "backoff", "bayes", "thompson", "pass_rate"],
    "filter": ["keep_all", "zero_variance", {"name": "zero_variance", "refill": False}],
    "gates": [[], [PRUNING]],
    "advantage": [None, "grpo", "rloo", "dr_grpo", "max_at_k", "opo", "reinforce_pp", "opob", "otb", "remax"],
    "step_scale": ["none", "ess"],
}


def expected(methods: dict[str, Any]) -> str | None:
    """What the refusal of these names; None: they work."""
    if methods["advantage"] in ("otb", "remax"):
        return "advantage|step_scale"  # whichever is looked at first
    if methods["advantage"] == "reinforce_pp" and methods["selector"] in ("greso", "backoff", "bayes", "thompson"):
        return "selector"
    if methods["advantage"] == "reinforce_pp" and methods["filter"] != "keep_all":
        return "filter"
    if methods["advantage"] == "max_at_k" and methods["gates"]:
        return "gates"  # it needs four siblings, and so leaves nothing to prune
    if methods["step_scale"] == "ess" and not methods["gates"]:
        return "step_scale"
    return None


def two_steps(methods: dict[str, Any], arguments: dict[str, Any], out: Path) -> None:
    """Two steps with these methods, or their refusal by name before anything is written."""
    ids = [row["row"] for row in arguments["train_dataset"]]
    profile = out.parent / "profile.jsonl"
    profile.write_text(
        "".join(json.dumps({"id": f"r{i}", "n": 4, "correct": i % 4, "mean_reward": 0.5}) + "\n" for i in ids)
    )
    rows = arguments["train_dataset"].map(lambda row: {"id": f"r{row['row']}"})
    if methods["selector"] == "pass_rate":
        methods = methods | {"selector": {"name": "pass_rate", "profile": str(profile)}}
    given = arguments | {"train_dataset": rows, "args": settings(out, max_steps=2)}
    if (named := expected(methods)) is not None:
        with pytest.raises(ConfigError, match=named):
            WinnowGRPOTrainer(**given, **methods)
        assert not (out / "winnow").exists()
        return
    WinnowGRPOTrainer(**given, **methods).train()
    assert [line["step"] for line in metrics(out)] == [1, 2]
    assert proven(out)["trained"]["rollouts"] > 0


def combinations() -> list[dict[str, Any]]:
    return [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]


def sample() -> list[dict[str, Any]]:
    """Some of the combinations, in which every option is there, and the advantages with everything else in turn."""
    every = {name: itertools.cycle(values) for name, values in OPTIONS.items() if name != "advantage"}
    return [{name: next(it) for name, it in every.items()} | {"advantage": a} for a in OPTIONS["advantage"]]


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("i", range(len(OPTIONS["advantage"])))
def test_methods_together(i: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    two_steps(sample()[i], arguments, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "advantage",
    [
        pytest.param(advantage, marks=[] if advantage in ("reinforce_pp", "max_at_k") else pytest.mark.exhaustive)
        for advantage in OPTIONS["advantage"]
    ],
)
def test_all_methods_together(advantage: str | None, arguments: dict[str, Any], tmp_path: Path) -> None:
    for i, methods in enumerate(m for m in combinations() if m["advantage"] == advantage):
        (tmp_path / str(i)).mkdir()
        two_steps(methods, arguments, tmp_path / str(i) / "out")


def test_a_reward_that_compares_siblings_is_refused_where_groups_come_in_parts(arguments: dict[str, Any]) -> None:
    def ranked(completions: list[str], **columns: Any) -> list[float]:
        return [sorted(completions).index(c) / len(completions) for c in completions]

    ranked.compares_siblings = True  # type: ignore[attr-defined]
    parts = {"group_size": {"name": "sequential", "probe": 2}, "advantage": "grpo"}
    with pytest.raises(ConfigError, match=r"ranked compares siblings .* group_size: sequential scores the first 2"):
        WinnowGRPOTrainer(**arguments | {"reward_funcs": ranked}, **parts)
    WinnowGRPOTrainer(**arguments | {"reward_funcs": ranked})


def test_trl_counts_the_templates_end_of_turn_as_an_end(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Winnow's engine ends rollouts there: TRL would count them as cut off, and save a model that goes on."""
    folder = save_chat_model(tmp_path / "chat")
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    own = {"model": str(folder), "processing_class": chat_tokenizer(), "train_dataset": Dataset.from_list(rows)}
    assert 2 not in WinnowGRPOTrainer(**arguments | own).eos_token_ids
    trainer = WinnowGRPOTrainer(**arguments | own, engine="local")
    assert {0, 2} <= {*trainer.eos_token_ids}
    assert {0, 2} <= {*trainer.model.generation_config.eos_token_id}


def test_a_resume_names_changed_code(arguments: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    helper = "def share(texts):\n    return [float(len(text.split()) % 2) for text in texts]\n"
    (tmp_path / "mine.py").write_text(
        "from helper import share\ndef mine(completions, **c): return share(completions)\n"
    )
    (tmp_path / "helper.py").write_text(helper)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("mine").mine
    saving = settings(tmp_path / "out", save_strategy="steps", save_steps=2, max_steps=2)
    WinnowGRPOTrainer(**arguments | {"reward_funcs": mine, "args": saving}).train()
    (tmp_path / "helper.py").write_text(helper.replace("% 2", "% 3"))
    more = settings(tmp_path / "out", save_strategy="steps", save_steps=2, max_steps=3)
    again = arguments | {"reward_funcs": mine, "args": more}
    words = "code of this run has changed since step 2: helper.py"
    with pytest.raises(ConfigError, match=f"resume: strict, but {words};"):
        WinnowGRPOTrainer(**again, resume="strict").train(resume_from_checkpoint=True)
    with pytest.warns(UserWarning, match=words):
        WinnowGRPOTrainer(**again).train(resume_from_checkpoint=True)
    lines = (tmp_path / "out" / "winnow" / "warnings.jsonl").read_text().splitlines()
    assert [json.loads(line)["warning"].startswith(words) for line in lines] == [True]


def test_a_resume_names_other_reward_functions(arguments: dict[str, Any], tmp_path: Path) -> None:
    def args(max_steps: int) -> Any:
        return settings(tmp_path / "out", save_strategy="steps", save_steps=2, max_steps=max_steps)

    def length(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    WinnowGRPOTrainer(**arguments | {"args": args(2)}).train()
    again = arguments | {"reward_funcs": [arguments["reward_funcs"], length], "args": args(3)}
    words = r"reward_funcs: saved with parity \(weight 1\), now parity \(weight 1\), length \(weight 1\)"
    with pytest.raises(ConfigError, match=f"{words}; resume=strict refuses this"):
        WinnowGRPOTrainer(**again, resume="strict").train(resume_from_checkpoint=True)
    with pytest.warns(UserWarning, match=words):
        WinnowGRPOTrainer(**again).train(resume_from_checkpoint=True)
