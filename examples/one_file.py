"""Group-relative policy gradients (GRPO, RLOO, Dr. GRPO) for a language model, in one file and from top to bottom.

Nothing here is fast: sampling has no key-value cache and the loss visits one rollout at a time. Everything is
spelled out instead, with torch and transformers only, so that it can be read in one sitting and so that a fast
implementation can be checked against it, token for token and gradient for gradient.

    python examples/one_file.py --model DIR --steps 5

DIR is a small causal LM whose tokenizer knows the words of the Countdown task below, e.g. one made with
`winnow warm-start`. Shapes are written into names: G siblings of a group, T tokens of a completion, V tokens of the
vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    prompts_per_step: int = 4
    num_generations: int = 8
    max_new_tokens: int = 24
    temperature: float = 1.0
    advantage: Literal["grpo", "rloo", "dr_grpo"] = "grpo"
    policy_loss: Literal["clip", "plain"] = "clip"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    loss_type: Literal["dapo", "grpo", "dr_grpo", "sequence_sum"] = "dapo"
    beta: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


# ---- 1. Noise: a random number is a function of what it is for, never of when it is drawn -------------------------
# The mixing function is SplitMix64's finalizer (Steele, Lea and Flood 2014) on 64-bit integers.

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def noise_key(*words: int) -> int:
    """One key for (seed, stream, prompt, epoch, sibling, turn); the stream is 0 in training."""
    key = 0
    for word in words:
        key = mix(key + GAMMA + mix(word))
    return key


def uniform(key: int, position: int) -> float:
    """The number in [0, 1) with which token `position` of a turn is drawn: the top 24 bits of a 64-bit hash."""
    return (mix(key + (position + 1) * GAMMA) >> 40) * 2.0**-24


# ---- 2. The task: Countdown, reach a target from a few numbers ----------------------------------------------------


@dataclass(frozen=True)
class Puzzle:
    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"numbers {' '.join(map(str, self.numbers))} target {self.target} :"


def puzzles(count: int, seed: int) -> list[Puzzle]:
    """Random puzzles `a + b * c` and the like; each has a solution."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        a, b, c = (rng.randint(1, 12) for _ in range(3))
        target = rng.choice([a + b + c, a + b * c, a * b - c, (a + b) * c])
        if 1 <= target <= 99:
            found.append(Puzzle(tuple(sorted((a, b, c))), target))
    return found


def reward(text: str, numbers: Sequence[int], target: int) -> float:
    """1 for a chain of right steps that uses every number once and ends in the target.

    `3 + 5 = 8 , 8 * 2 = 16` solves 2 3 5 -> 16. Otherwise a tenth of the share of the numbers that were written at
    all, so that even an untrained model gets different rewards within a group.
    """
    left = list(numbers)
    for step in text.split(","):
        words = step.split()
        if len(words) != 5 or words[3] != "=" or not all(w.isdigit() for w in words[::2]):
            break
        a, b, result = (int(w) for w in words[::2])
        right = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}.get(words[1])
        if right != result or a not in left or b not in [n for i, n in enumerate(left) if i != left.index(a)]:
            break
        left.remove(a)
        left.remove(b)
        left.append(result)
    if left == [target]:
        return 1.0
    written = text.split()
    return 0.1 * sum(str(n) in written for n in numbers) / len(numbers)


# ---- 3. Sampling --------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    prompt_ids: list[int]
    token_ids: list[int]
    """As sampled, the end-of-sequence token included."""
    old_logp_T: torch.Tensor
    """Log-probability of each sampled token under the policy that sampled it."""


@torch.no_grad()
def sample_group(model: Any, prompt_ids: list[int], keys_G: list[int], eos: int, s: Settings) -> list[Rollout]:
    """One completion a key, by inverse CDF: token v is taken when the uniform number falls into its interval.

    Siblings advance together. One that has ended is extended with whatever comes, and cut afterwards.
    """
    sequences_GT = torch.tensor([prompt_ids] * len(keys_G))
    columns = []
    for position in range(s.max_new_tokens):
        logp_GV = (model(input_ids=sequences_GT).logits[:, -1] / s.temperature).log_softmax(-1)
        cdf_GV = logp_GV.double().exp().cumsum(-1)
        u_G = torch.tensor([uniform(key, position) for key in keys_G], dtype=torch.float64)
        tokens_G = (cdf_GV <= cdf_GV[:, -1:] * u_G[:, None]).sum(-1)
        columns.append(logp_GV.gather(1, tokens_G[:, None]))
        sequences_GT = torch.cat([sequences_GT, tokens_G[:, None]], dim=1)
    completions_GT, logp_GT = sequences_GT[:, len(prompt_ids) :], torch.cat(columns, dim=1)
    rollouts = []
    for tokens, logp_T in zip(completions_GT.tolist(), logp_GT, strict=True):
        length = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        rollouts.append(Rollout(prompt_ids, tokens[:length], logp_T[:length]))
    return rollouts


# ---- 4. Advantages: how much better than its siblings was a rollout? ----------------------------------------------


def advantages(rewards_G: list[float], kind: str, eps: float = 1e-6) -> list[float]:
    """grpo: (r - mean) / (std + eps). rloo: r - mean of the others. dr_grpo: r - mean."""
    n = len(rewards_G)
    mean = sum(rewards_G) / n
    if kind == "grpo":
        std = (sum((r - mean) ** 2 for r in rewards_G) / n) ** 0.5
        return [(r - mean) / (std + eps) for r in rewards_G]
    if kind == "rloo":
        return [r - (sum(rewards_G) - r) / (n - 1) for r in rewards_G]
    if kind == "dr_grpo":
        return [r - mean for r in rewards_G]
    raise ValueError(f"advantage must be grpo, rloo or dr_grpo, not {kind!r}")


# ---- 5. The loss --------------------------------------------------------------------------------------------------


def log_probs(model: Any, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] log-probability of every sampled token, and [T] entropy of the distribution it was drawn from."""
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    logits_TV = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature
    logp_TV = logits_TV.log_softmax(-1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_TV.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0], entropy_T


def policy_term(logp_T: torch.Tensor, old_logp_T: torch.Tensor, advantage: float, s: Settings) -> torch.Tensor:
    """[T]: REINFORCE, or PPO's clipped surrogate, which stops paying once the ratio has moved far enough."""
    if s.policy_loss == "plain":
        return -advantage * logp_T
    ratio_T = (logp_T - old_logp_T).exp()
    clipped_T = ratio_T.clamp(1 - s.epsilon, 1 + s.epsilon_high)
    return -torch.minimum(ratio_T * advantage, clipped_T * advantage)


def importance(logp_T: torch.Tensor, old_logp_T: torch.Tensor, s: Settings) -> torch.Tensor:
    """[T]: how much more often the policy takes these tokens than the one that sampled them; no gradient."""
    ratio_T = (logp_T - old_logp_T).exp().detach()
    return torch.ones_like(ratio_T) if s.policy_loss == "plain" else ratio_T


def kl_term(logp_T: torch.Tensor, ref_logp_T: torch.Tensor, estimator: str) -> torch.Tensor:
    """[T]: Schulman's estimators of KL(policy || reference) from tokens of the policy."""
    log_ratio_T = logp_T - ref_logp_T
    if estimator == "k1":
        return log_ratio_T
    if estimator == "k2":
        return log_ratio_T**2 / 2
    return (-log_ratio_T).exp() - 1 + log_ratio_T


def token_weight(length: int, lengths_N: list[int], s: Settings) -> float:
    """What one token of a rollout of `length` tokens counts in a batch of N rollouts."""
    n = len(lengths_N)
    return {
        "dapo": 1 / sum(lengths_N),  # mean over all tokens of the batch
        "grpo": 1 / (n * length),  # mean over a rollout's tokens, then over rollouts
        "dr_grpo": 1 / (n * s.max_new_tokens),  # the same constant for every token, whatever the lengths
        "sequence_sum": 1 / n,  # sum over tokens, mean over rollouts
    }[s.loss_type]


def backward(model: Any, reference: Any, rollouts_N: list[Rollout], advantages_N: list[float], s: Settings) -> float:
    """Add the gradient of the loss to `.grad`; returns the loss."""
    lengths_N = [len(r.token_ids) for r in rollouts_N]
    total = 0.0
    for rollout, advantage in zip(rollouts_N, advantages_N, strict=True):
        logp_T, entropy_T = log_probs(model, rollout, s.temperature)
        per_token_T = policy_term(logp_T, rollout.old_logp_T, advantage, s)
        if s.beta:
            with torch.no_grad():
                ref_logp_T, _ = log_probs(reference, rollout, s.temperature)
            weight_T = importance(logp_T, rollout.old_logp_T, s)
            per_token_T = per_token_T + s.beta * weight_T * kl_term(logp_T, ref_logp_T, s.kl_estimator)
        per_token_T = per_token_T - s.entropy_coef * entropy_T
        loss = token_weight(len(rollout.token_ids), lengths_N, s) * per_token_T.sum()
        loss.backward()
        total += loss.item()
    return total


# ---- 6. The loop: sample, reward, compare, update -----------------------------------------------------------------


@dataclass
class Step:
    rollouts_N: list[Rollout]
    rewards_N: list[float]
    advantages_N: list[float]
    loss: float
    grad_norm: float


def train(model: Any, tokenizer: Any, tasks: Sequence[Puzzle], steps: int, s: Settings) -> Iterator[Step]:
    """Train `model` in place, `prompts_per_step` tasks a step, in order, over and over."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, weight_decay=s.weight_decay)
    visit = 0
    for _ in range(steps):
        rollouts_N: list[Rollout] = []
        rewards_N: list[float] = []
        advantages_N: list[float] = []
        for _ in range(s.prompts_per_step):
            epoch, ordinal = divmod(visit, len(tasks))
            visit += 1
            task = tasks[ordinal]
            keys_G = [noise_key(s.seed, 0, ordinal, epoch, sibling, 0) for sibling in range(s.num_generations)]
            group = sample_group(model, tokenizer.encode(task.prompt), keys_G, tokenizer.eos_token_id, s)
            texts = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in group]
            rewards_G = [reward(text, task.numbers, task.target) for text in texts]
            rollouts_N += group
            rewards_N += rewards_G
            advantages_N += advantages(rewards_G, s.advantage)
        loss = backward(model, reference, rollouts_N, advantages_N, s)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        yield Step(rollouts_N, rewards_N, advantages_N, loss, grad_norm)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description="GRPO on Countdown, spelled out")
    parser.add_argument("--model", required=True, help="directory of a small causal LM")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--float64", action="store_true", help="compute in double precision")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    directory, steps, float64 = options.pop("model"), options.pop("steps"), options.pop("float64")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64 if float64 else torch.float32)
    tasks = puzzles(1000, seed=0)
    for number, step in enumerate(train(model, tokenizer, tasks, steps, Settings(**options)), start=1):
        mean = sum(step.rewards_N) / len(step.rewards_N)
        best = max(zip(step.rewards_N, step.rollouts_N, strict=True), key=lambda pair: pair[0])[1]
        print(f"step {number}: reward {mean:.3f}, loss {step.loss:+.4f}, gradient norm {step.grad_norm:.3f}")
        print(f"  best: {tokenizer.decode(best.prompt_ids)} {tokenizer.decode(best.token_ids)}")


if __name__ == "__main__":
    main()
