"""With max_lag = 0 the whole trainer does what `examples/one_file.py` spells out, in double precision.

`test_run_*`: same tokens, rewards, advantages, losses, gradient norms and, after three steps, weights.
`test_update_*`: one update off-policy, where ratios leave the clip range and the reference has another opinion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.base import noise
from winnow.env.base import Env, RewardFn
from winnow.learner import batch
from winnow.learner.base import Stats
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.rows import rows_of
from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.correct.none import NoScale
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Clip, Plain
from winnow.run.callbacks import TrainerCallback, TrainerState
from winnow.run.trainer import Trainer
from winnow.types import Group, Prompt, Rollout, Visit

STEPS = 3
N_PUZZLES = 8
"""Three steps of three prompts reach into the second epoch."""


# ---------------------------------------------------------------- both sides


@dataclass
class Puzzles:
    """The oracle's puzzles as a task."""

    train: list[Prompt]
    reward_funcs: list[RewardFn]
    name: str = "puzzles"
    test: list[Prompt] = field(default_factory=list)
    max_turns: int = 1
    stop: tuple[str, ...] = ()

    def make_env(self, prompt: Prompt) -> Env | None:
        return None

    def fingerprint(self) -> str:
        return self.name


class Recorded(TrainerCallback):
    """Keeps every step's groups and metrics."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, float], list[Group]]] = []

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.steps.append((state.log_history[-1], kwargs["groups"]))


def settings_of(oracle: ModuleType, **values: Any) -> Any:
    small = {"prompts_per_step": 3, "num_generations": 6, "max_new_tokens": 12, "learning_rate": 3e-3, "seed": 5}
    return oracle.Settings(**small | values)


def puzzle_task(oracle: ModuleType) -> Puzzles:
    def score(completions: list[str], numbers: list[list[int]], target: list[int]) -> list[float | None]:
        return [oracle.reward(c, n, t) for c, n, t in zip(completions, numbers, target, strict=True)]

    prompts = [
        Prompt(str(i), i, text=p.prompt, columns={"numbers": list(p.numbers), "target": p.target})
        for i, p in enumerate(oracle.puzzles(N_PUZZLES, seed=0))
    ]
    return Puzzles(prompts, [score])


def run_config(s: Any, output_dir: Path, **values: Any) -> dict[str, Any]:
    same = ("seed", "prompts_per_step", "num_generations", "temperature", "advantage", "policy_loss", "epsilon")
    same += ("loss_type", "beta", "kl_estimator", "entropy_coef", "learning_rate", "weight_decay", "max_grad_norm")
    config = {name: getattr(s, name) for name in same}
    config |= {"max_completion_length": s.max_new_tokens, "max_steps": STEPS, "output_dir": str(output_dir)}
    if s.policy_loss == "clip":
        config["epsilon_high"] = s.epsilon_high
    return config | {"selector": "ordered", "device": "cpu"} | values


def run_winnow(oracle: ModuleType, model: Any, tokenizer: Any, s: Any, tmp_path: Path, **values: Any) -> Recorded:
    config = run_config(s, tmp_path / "run", **values)
    recorded = Recorded()
    task = puzzle_task(oracle)
    Trainer(model, task, config=config, processing_class=tokenizer, callbacks=[recorded]).train()
    return recorded


def assert_same_run(recorded: Recorded, model: Any, steps: list[Any], reference: Any, s: Any, *, rtol: float) -> None:
    """Tokens, rewards and advantages are equal outright; what is computed from them within `rtol`."""
    for (metrics, groups), step in zip(recorded.steps, steps, strict=True):
        rollouts = [r for g in groups for r in g.rollouts]
        assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids for r in step.rollouts_N]
        assert [r.reward for r in rollouts] == step.rewards_N
        np.testing.assert_allclose(
            np.concatenate([r.sampler_logp for r in rollouts]),
            torch.cat([r.old_logp_T for r in step.rollouts_N]),
            atol=1e-5,
        )
        rows = rows_of(groups, ADVANTAGES[s.advantage](), s.loss_type, max_completion_length=s.max_new_tokens)
        np.testing.assert_allclose([r.advantage for r in rows], step.advantages_N, rtol=1e-9, atol=1e-9)
        assert metrics["loss"] == pytest.approx(step.loss, rel=rtol, abs=rtol)
        assert metrics["grad_norm"] == pytest.approx(step.grad_norm, rel=rtol)
    for (name, ours), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol, msg=lambda m, name=name: f"{name}: {m}")


# ---------------------------------------------------------------- noise and whole runs


@given(words=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6), position=st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_noise_is_the_documented_construction(oracle: ModuleType, words: list[int], position: int) -> None:
    key = oracle.noise_key(*words)
    assert key == noise.noise_key(*words)
    drawn = noise.uniform_array(key, np.array([position]))
    assert drawn.item() == oracle.uniform(key, position)


RUNS: list[dict[str, Any]] = [
    {"advantage": "rloo", "policy_loss": "plain", "loss_type": "sequence_sum"},
    {"advantage": "grpo", "policy_loss": "plain", "loss_type": "dapo", "temperature": 0.7},
    {"advantage": "dr_grpo", "policy_loss": "plain", "loss_type": "dr_grpo", "beta": 0.1, "kl_estimator": "k2"},
    {"advantage": "grpo", "policy_loss": "plain", "loss_type": "grpo", "entropy_coef": 0.05, "weight_decay": 0.1},
]


@pytest.mark.parametrize("values", RUNS, ids=lambda v: "-".join(map(str, v.values())))
def test_run_is_the_oracles(
    oracle: ModuleType, make_model: Any, tokenizer: Any, tmp_path: Path, values: dict[str, Any]
) -> None:
    s = settings_of(oracle, **values)
    model, reference = make_model(), make_model()
    steps = list(oracle.train(reference, tokenizer, oracle.puzzles(N_PUZZLES, seed=0), STEPS, s))
    recorded = run_winnow(oracle, model, tokenizer, s, tmp_path)
    assert_same_run(recorded, model, steps, reference, s, rtol=1e-9)
    lengths = [len(r.token_ids) for step in steps for r in step.rollouts_N]
    assert min(lengths) < s.max_new_tokens == max(lengths)
    assert sum(any(step.advantages_N) for step in steps) >= 2


def test_the_file_runs_as_a_program(
    oracle: ModuleType, make_model: Any, tokenizer: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ["--steps", "2", "--num-generations", "4", "--max-new-tokens", "5", "--advantage", "rloo", "--float64"]
    monkeypatch.setattr("sys.argv", ["one_file.py", "--model", str(tmp_path), *options])
    oracle.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == ["step 1", "step 2"]


def test_run_with_clipping_is_the_oracles(oracle: ModuleType, make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The ratio is taken against the sampler's float32 log-probabilities, so only that much can agree."""
    s = settings_of(oracle, policy_loss="clip", epsilon_high=0.28, beta=0.05)
    model, reference = make_model(), make_model()
    steps = list(oracle.train(reference, tokenizer, oracle.puzzles(N_PUZZLES, seed=0), STEPS, s))
    recorded = run_winnow(oracle, model, tokenizer, s, tmp_path, tokens_per_microbatch=64)
    assert_same_run(recorded, model, steps, reference, s, rtol=1e-5)


def test_run_does_not_depend_on_slots_or_what_is_shared(
    oracle: ModuleType, make_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PAIRS_PER_TOKEN", 1e9)
    s = settings_of(oracle, advantage="rloo", policy_loss="plain")
    reference, model = make_model(), make_model()
    steps = list(oracle.train(reference, tokenizer, oracle.puzzles(N_PUZZLES, seed=0), STEPS, s))
    recorded = run_winnow(oracle, model, tokenizer, s, tmp_path, engine={"name": "local", "slots": 5})
    assert_same_run(recorded, model, steps, reference, s, rtol=1e-9)


# ---------------------------------------------------------------- one update, off-policy


@pytest.fixture(scope="module")
def sampled(oracle: ModuleType, make_model: Any, tokenizer: Any) -> list[tuple[Any, list[Any]]]:
    """Puzzles and their groups of rollouts, with rewards of any size: the update does not care where they come from."""
    s, model = settings_of(oracle), make_model()
    groups = []
    for ordinal, puzzle in enumerate(oracle.puzzles(4, seed=0)):
        keys = [oracle.noise_key(s.seed, 0, ordinal, 0, i, 0) for i in range(s.num_generations)]
        ids = tokenizer.encode(puzzle.prompt)
        groups.append((puzzle, oracle.sample_group(model, ids, keys, tokenizer.eos_token_id, s)))
    for _, rollouts in groups:
        for i, rollout in enumerate(rollouts):
            del rollout.token_ids[1 + 2 * i :]
            rollout.old_logp_T = rollout.old_logp_T[: len(rollout.token_ids)].float()
    return groups


REWARDS = [
    [1.0, 0.0, 0.1, 0.0, 1.0, 0.0],
    [0.0, 1.0, 1.0, 0.0, 0.0, 0.0],
    [0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
    [-1.0, 2.0, 0.5, 0.0, 0.0, 1.0],
]


def as_group(number: int, rollouts: list[Any], rewards: list[float]) -> Group:
    def convert(sibling: int, rollout: Any, reward: float) -> Rollout:
        n = len(rollout.token_ids)
        return Rollout(
            sibling=sibling,
            prompt_ids=tuple(rollout.prompt_ids),
            token_ids=np.array(rollout.token_ids),
            action_mask=np.ones(n, bool),
            sampler_logp=rollout.old_logp_T.numpy(),
            versions=np.zeros(n, np.int32),
            reward=reward,
        )

    members = [convert(i, r, x) for i, (r, x) in enumerate(zip(rollouts, rewards, strict=True))]
    return Group(Visit(number, 0, Prompt(str(number), number, text="")), members)


def perturbed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


class Spy(LocalLearner):
    """Keeps the gradients and sums of the last update."""

    def forward_backward(self, batch: Any, loss: LossConfig, stats: Stats) -> None:
        super().forward_backward(batch, loss, stats)
        self.stats = stats
        self.gradients = [p.grad.clone() for p in self._params.values() if p.grad is not None]


def winnow_update(groups: list[Group], model: Any, reference: Any, s: Any, tokens_per_microbatch: int) -> tuple:
    loss = LossConfig(
        policy_loss=Plain() if s.policy_loss == "plain" else Clip(s.epsilon, s.epsilon_high),
        loss_type=s.loss_type,
        beta=s.beta,
        kl_estimator=s.kl_estimator,
        entropy_coef=s.entropy_coef,
    )
    distribution = TokenDistribution(model.config.vocab_size, s.temperature)
    learner = Spy(
        model,
        distribution,
        LearnerOptions(max_grad_norm=s.max_grad_norm, tokens_per_microbatch=tokens_per_microbatch),
        reference,
    )
    options = StepOptions(
        learning_rate=s.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_steps=1,
        num_iterations=1,
        max_completion_length=s.max_new_tokens,
        mask_truncated_completions=False,
        seed=0,
    )
    metrics = OptimizerStep(learner, ADVANTAGES[s.advantage](), loss, NoScale(), options)(groups, 0)
    return metrics, learner


def check_update(oracle: ModuleType, make_model: Any, sampled: Any, s: Any, tokens_per_microbatch: int) -> Spy:
    theirs = perturbed(make_model())
    advantages_N = [a for rewards in REWARDS for a in oracle.advantages(rewards, s.advantage)]
    rollouts_N = [r for _, rollouts in sampled for r in rollouts]
    loss = oracle.backward(theirs, make_model(), rollouts_N, advantages_N, s)
    gradients = [p.grad.clone() for p in theirs.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), s.max_grad_norm)
    torch.optim.AdamW(theirs.parameters(), lr=s.learning_rate, weight_decay=0.0).step()

    groups = [as_group(i, rollouts, REWARDS[i]) for i, (_, rollouts) in enumerate(sampled)]
    ours = perturbed(make_model())
    metrics, learner = winnow_update(groups, ours, make_model(), s, tokens_per_microbatch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    for mine, other in zip(learner.gradients, gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    return learner


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "dr_grpo"])
@pytest.mark.parametrize("policy_loss", ["clip", "plain"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "sequence_sum"])
def test_update_is_the_oracles(
    oracle: ModuleType, make_model: Any, sampled: Any, advantage: str, policy_loss: str, loss_type: str
) -> None:
    s = settings_of(oracle, advantage=advantage, policy_loss=policy_loss, loss_type=loss_type, epsilon_high=0.28)
    learner = check_update(oracle, make_model, sampled, s, tokens_per_microbatch=100)
    clipped = learner.stats.sums["clip_low"], learner.stats.sums["clip_high"]
    assert all(n > 0 for n in clipped) if policy_loss == "clip" else not any(clipped)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "sequence_sum"])
def test_update_with_kl_and_entropy_is_the_oracles(
    oracle: ModuleType, make_model: Any, sampled: Any, kl_estimator: str, loss_type: str
) -> None:
    """Rows of zero-variance groups now carry a gradient too, under the same denominator."""
    terms = {"beta": 0.2, "kl_estimator": kl_estimator, "entropy_coef": 0.1, "temperature": 0.8}
    check_update(oracle, make_model, sampled, settings_of(oracle, loss_type=loss_type, **terms), 10_000)


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("tokens_per_microbatch", [1, 40, 10_000])
@pytest.mark.parametrize("pairs", [0.0, batch.PAIRS_PER_TOKEN, 1e9])
def test_update_does_not_depend_on_microbatches(
    oracle: ModuleType,
    make_model: Any,
    sampled: Any,
    monkeypatch: pytest.MonkeyPatch,
    tokens_per_microbatch: int,
    pairs: float,
) -> None:
    """Nor on whether what siblings share is computed once: never, where it pays, always."""
    monkeypatch.setattr(batch, "PAIRS_PER_TOKEN", pairs)
    s = settings_of(oracle, beta=0.1, policy_loss="clip", max_grad_norm=0.01)
    check_update(oracle, make_model, sampled, s, tokens_per_microbatch)
