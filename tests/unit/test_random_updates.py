"""Random updates, of every method and all that can be set, against plain autograd in float64."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.step import OptimizerStep, StepOptions
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.correct import CORRECTIONS, STEP_SCALES
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Clip, Plain
from winnow.types import Fate, Group, Prompt, Rollout, Segment, Visit

from .autograd_reference import Setting, distributions, sampled, update
from .learner_models import VOCABULARY, gpt2, llama

RATE = 0.05
CORRECTIONS_DRAWN: list[tuple[str, dict[str, Any]]] = [
    *[("none", {})] * 3,
    *[
        ("truncate", {"level": level, "high": high})
        for level in ("token", "sequence", "geometric")
        for high in (1.2, 8)
    ],
    ("truncate", {"low": 0.9, "high": 1.1}),
    *[("mask", {"level": level, "low": 0.8, "high": 1.3}) for level in ("token", "sequence", "geometric")],
    ("mask", {"level": "geometric", "low": 0.9, "high": None, "only_negative": True, "weigh": False}),
    ("m2po", {}),
    ("m2po", {"weigh": False}),
]


def draw_setting(rng: np.random.Generator) -> Setting:
    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    advantage = one(*ADVANTAGES)
    options: dict[str, Any] = {"max_at_k": {"k": one(2, 3)}, "opob": {"scope": one("group", "minibatch")}}.get(
        advantage, {}
    )
    if advantage == "opob" and one(True, False):
        options["scale"] = True
    in_update = advantage in ("opob", "otb")
    correction, correction_options = CORRECTIONS_DRAWN[rng.integers(len(CORRECTIONS_DRAWN))]
    if in_update and (correction == "m2po" or correction_options.get("only_negative")):
        correction, correction_options = "truncate", {}
    policy_loss = "plain" if in_update else one("plain", "clip")
    if policy_loss == "plain" and not correction_options.get("weigh", True):
        policy_loss = "clip"
    return Setting(
        advantage=advantage,
        options=options,
        loss_type=one("dapo", "grpo", "dr_grpo", "sequence_sum"),
        group_weighting=one(None, "equal", "size"),
        policy_loss=policy_loss,
        level=one("token", "sequence") if policy_loss == "clip" else "token",
        epsilon=one(0.05, 0.2),
        epsilon_high=one(0.05, 0.28),
        beta=0.0 if in_update else one(0.0, 0.0, 0.3),
        kl_estimator=one("k1", "k2", "k3"),
        entropy_coef=0.0 if in_update else one(0.0, 0.0, 0.1),
        correction=correction,
        correction_options=correction_options,
        step_scale=one("none", "ess"),
        iterations=one(1, 1, 2),
        mask_truncated=one(False, False, True),
        unbiased=one(False, False, True),
        temperature=one(1.0, 0.7),
        max_grad_norm=one(None, 0.01, 100.0),
    )


def draw_segments(rng: np.random.Generator, length: int, prompts: list[tuple[int, ...]]) -> list[Segment]:
    """Up to three segments after the first, each on a prompt of its own or on one that siblings share."""
    starts = sorted(rng.choice(np.arange(1, length), min(int(rng.integers(0, 4)), length - 1), replace=False).tolist())
    own = [tuple(rng.integers(0, VOCABULARY, rng.integers(1, 9)).tolist()) for _ in starts]
    return [Segment(s, prompts[0] if rng.random() < 0.3 else p) for s, p in zip(starts, own, strict=True)]


def draw_groups(rng: np.random.Generator, model: Any, s: Setting, segments: bool = False) -> list[Group]:
    """Of one to three prompts; with rollouts that failed or were pruned, and words of an environment in between."""
    groups = []
    for number in range(rng.integers(1, 4)):
        size, kind = int(rng.integers(2, 5)), rng.integers(4)
        shared = tuple(rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist())
        apart, rollouts = rng.random() < 0.3, []
        for sibling in range(size + (s.advantage == "remax")):
            length = int(rng.integers(1, 11))
            mask = rng.random(length) < 0.8
            mask[0] = True
            prompt = tuple(rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist()) if apart else shared
            tokens = rng.integers(0, VOCABULARY, length)
            later = draw_segments(rng, length, [shared]) if segments else []
            mask[[segment.start for segment in later]] = True
            versions, no_logp = np.where(mask, 0, -1), np.zeros(length, np.float32)
            rollout = Rollout(sibling, prompt, tokens, mask, no_logp, versions, later_segments=later)
            with torch.no_grad():
                logp = sampled(distributions(model, rollout, s.temperature), rollout).numpy()
            rollout.sampler_logp[mask] = logp + rng.normal(0, 0.3, len(logp))
            rollout.greedy = sibling == size
            rollout.reward = [float(rng.integers(2)), 1.0, float(rng.choice([0, 0.1, 1.1])), rng.normal()][kind]
            rollout.stop_reason = str(rng.choice(["eos", "length"]))
            rollout.survival_p = float(rng.choice([1.0, 0.5, 0.25])) if s.unbiased else 1.0
            if not rollout.greedy and rng.random() < 0.1:
                rollout.reward, rollout.fate = None, Fate.PRUNED if rng.random() < 0.5 else Fate.FAILED
            rollouts.append(rollout)
        groups.append(Group(Visit(number, 0, Prompt(f"p{number}", number, text="x")), rollouts))
    return groups


def difference(seed: int, segments: bool) -> tuple[float, str, Setting]:
    """Largest difference of a weight after the update, over the largest change of one; the model; the setting."""
    rng = np.random.default_rng(seed)
    s = draw_setting(rng)
    make = llama if rng.random() < 0.25 else gpt2
    model, reference = make().double(), make().double()  # type: ignore[operator]
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.9)
    groups = draw_groups(rng, model, s, segments)
    expected = copy.deepcopy(model)
    shares = update(expected, reference, groups, s, RATE)
    loss = LossConfig(
        policy_loss=Plain() if s.policy_loss == "plain" else Clip(s.epsilon, s.epsilon_high, s.level),  # type: ignore[arg-type]
        loss_type=s.loss_type,  # type: ignore[arg-type]
        group_weighting=s.group_weighting,  # type: ignore[arg-type]
        beta=s.beta,
        kl_estimator=s.kl_estimator,  # type: ignore[arg-type]
        entropy_coef=s.entropy_coef,
        correction=CORRECTIONS[s.correction](**s.correction_options),
    )
    tokens = int(rng.choice([1, 40, 10_000]))
    given = LearnerOptions(optim="sgd", max_grad_norm=s.max_grad_norm, tokens_per_microbatch=tokens)
    before = [p.detach().clone() for p in model.parameters()]
    learner = LocalLearner(model, TokenDistribution(VOCABULARY, s.temperature), given, reference)
    options = StepOptions(
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_steps=9,
        num_iterations=s.iterations,
        max_completion_length=s.max_length,
        mask_truncated_completions=s.mask_truncated,
        seed=0,
        unbiased=s.unbiased,
    )
    step = OptimizerStep(
        learner, ADVANTAGES[s.advantage](**s.options), loss, STEP_SCALES[s.step_scale]().build(), options
    )
    found = step(groups, 0)
    if "ess_ratio" in found:
        assert found["ess_ratio"] == pytest.approx(shares[-1], rel=1e-6)
    pairs = list(zip(model.parameters(), expected.parameters(), before, strict=True))
    with torch.no_grad():
        change = max(float((theirs - p).abs().max()) for _, theirs, p in pairs)
        off = max(float((ours - theirs).abs().max()) for ours, theirs, _ in pairs)
    return off / max(change, 1e-6), make.__name__, s


def assert_equal(seeds: range, segments: bool = False) -> None:
    """To rounding: Llama's norms are float32 whatever the model is, GPT-2's are not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradients of rollouts are computed one rollout at a time")
        for seed in seeds:
            off, model, setting = difference(seed, segments)
            assert off < (1e-10 if model == "gpt2" else 1e-5), f"seed {seed}, {model}: {off:.2g} off, {setting}"


def test_thirty_random_updates_are_those_of_plain_autograd() -> None:
    assert_equal(range(30))


@pytest.mark.slow
def test_thirty_random_updates_on_rollouts_of_several_segments() -> None:
    assert_equal(range(30), segments=True)


@pytest.mark.exhaustive
def test_a_thousand_random_updates_on_rollouts_of_several_segments() -> None:
    assert_equal(range(30, 1030), segments=True)


@pytest.mark.exhaustive
def test_eleven_hundred_random_updates_are_those_of_plain_autograd() -> None:
    assert_equal(range(30, 1130))
