"""Silent failures. Each is detected from step metrics within two steps and reported once.

Real systems trained through them for hours: a sampler that kept its initial weights after a resume, a tied head that
was never updated, a constant reward, an evaluation that did not run, a learning rate of 0.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ..config import RunConfig
from ..methods.success import AGENT, PUNISHMENT
from ..types import Group, Rollout
from .collapse import ENTROPY, PATIENCE, entropy_message, ess_message, ess_of, low_ess

Metrics = Mapping[str, float]
GAP = "sampling/sampling_logp_difference/mean"
GROWN = 4
"""Multiple of the first step's difference of engine and learner beyond which it is not rounding."""
SMALLEST_GAP = 1e-4
"""Differences below this are always rounding, nats a token."""
SAME_STEPS = 2
"""Consecutive steps with one reward for everything, or without a learning rate, before the report."""
ROUNDING = 1e-9
"""Largest standard deviation of a constant reward such as 0.1, relative to its size."""
NO_RATE = 1e-6
"""Share of the highest learning rate below which the policy learns nothing."""
LAST = 0.01
"""Share of the steps at the end where that is no failure: a cosine ends there."""
MIN_AGENT_ROLLOUTS = 8
"""Fewest rollouts with rewards by agent in which their constant mean is reported."""
MISSED = 0.3
"""Excess of mean reward over pass@1 from which right answers may count as wrong."""


class Watchdogs:
    """Checks every step's metrics, and probes of engine and learner.

    `functions`: names of the reward functions; `in_threads`: those that run in a thread of this process. `opening`: a
    tag such as `<think>` that prompts end in.
    """

    def __init__(
        self,
        config: RunConfig,
        functions: Collection[str] = (),
        in_threads: Collection[str] = (),
        opening: str = "",
    ) -> None:
        self._config = config
        self._functions = functions
        self._in_threads = in_threads
        self._opening = opening
        self._first: dict[str, float] = {}
        """Gap of engine and learner and entropy at the first steps that had them."""
        self._sampled: deque[Metrics] = deque(maxlen=PATIENCE)
        """The latest steps with samples, to see whether the policy has become deterministic."""
        self._updates: deque[Metrics] = deque(maxlen=PATIENCE)
        """The latest updates, to see whether few rollouts dominate them."""
        self._same: dict[str, tuple[float, int]] = {}
        """Constant reward of each function and its consecutive steps; reported once, at `SAME_STEPS`."""
        self._constant: set[str] = set()
        """Reward functions reported as constant."""
        self._rollouts: list[Rollout] = []
        """Those of the step."""
        self._silent: Counter[str] = Counter()
        """Consecutive steps in which a function judged no completion."""
        self._still = 0
        """Consecutive steps with almost no learning rate."""
        self._rules: list[Callable[[Metrics], str | None]] = [
            *(self._low_ess, self._low_entropy, self._old_weights, self._no_evaluation, self._no_learning),
            *(self._near_misses, self._not_asked, self._returned_none, self._undecided_agents),
        ]

    def recall(self, row: Metrics) -> None:
        """Take a row of metrics.jsonl from before a resume, for the figures of the first steps."""
        self._first = {key: float(row[key]) for key in (GAP, ENTROPY) if key in row} | self._first

    def observe(self, row: Metrics, groups: Sequence[Group] = ()) -> Iterator[str]:
        """Yield warnings for a row of metrics.jsonl; each kind once, constant rewards once a function.

        `groups`: those that finished in the step.
        """
        self._rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rule in [*self._rules]:
            if (message := rule(row)) is not None:
                self._rules.remove(rule)
                yield message
        yield from self._one_reward(row)

    def probed(self, gap: float) -> str | None:
        """Return a warning about the gap of engine and learner in probes, at a start or after the first update."""
        message = self._grown(gap)
        if message is None or self._old_weights not in self._rules:
            return None
        self._rules.remove(self._old_weights)
        return message

    def _low_ess(self, row: Metrics) -> str | None:
        if ess_of(row) is not None:
            self._updates.append(row)
        window = low_ess(self._updates)
        return ess_message(window) if window else None

    def _low_entropy(self, row: Metrics) -> str | None:
        if ENTROPY not in row:
            return None
        self._sampled.append(row)
        return entropy_message(self._sampled, self._first.setdefault(ENTROPY, row[ENTROPY]))

    def _old_weights(self, row: Metrics) -> str | None:
        if GAP not in row or row.get("lag/max", 0) > 0 or self._config.num_iterations > 1:
            return None  # the policy has moved since the tokens were sampled, as it should
        self._first.setdefault(GAP, row[GAP])
        if self._config.lora is not None and self._config.lora.dropout != 0:
            return None  # the gap has the update's dropout in it; `probed` compares without
        message = self._grown(row[GAP])
        if message and row.get("learning_rate") == 0:
            message += ". The learning rate is 0, so the policy cannot have moved"
        return message

    def _grown(self, gap: float) -> str | None:
        first = self._first.get(GAP)
        if first is None or gap <= max(GROWN * first, SMALLEST_GAP):
            return None
        return (
            f"the engine does not sample from the learner's weights: the log-probabilities of fresh tokens differ by "
            f"{gap:.2g} nats on average, {first:.2g} at the first step. It may have kept old ones (after a "
            "resume, or in a tied head that is not updated), or adapters are not merged"
        )

    def _one_reward(self, row: Metrics) -> Iterator[str]:
        keys = [key for key in row if key.startswith("rewards/") and key.endswith("/std")]
        names = [key.removeprefix("rewards/").removesuffix("/std") for key in keys]
        by_agent = any(name.startswith(AGENT) for name in names)
        for name in names:
            value, mean = row[f"rewards/{name}/std"], row[f"rewards/{name}/mean"]
            before, steps = self._same.get(name, (mean, 0))
            rounding = ROUNDING * max(1.0, abs(mean))
            one, again = value <= rounding, abs(before - mean) <= rounding
            self._same[name] = (mean, steps + 1 if one and again else int(one))
            harmless = name == PUNISHMENT and mean == 0  # no completion was too long
            harmless = harmless or (name == "env" and by_agent)  # the mean over agents, each of which is looked at
            if self._same[name][1] >= SAME_STEPS and name not in self._constant and not harmless:
                self._constant.add(name)
                who = f"the reward function '{name}'"
                remedy = "check samples.jsonl, and that it reads the right columns and completions"
                if name.partition("/")[0] == "env":
                    who = "the environment, or the agent," + (f" as reward '{name}'" if name != "env" else "")
                    remedy = "check samples.jsonl, and how it computes the reward"
                message = f"{who} gave {mean:g} to every completion of {SAME_STEPS} steps in a row: {remedy}"
                likely = self._causes_of_zero(name, row) if mean == 0 else ()
                causes = "; ".join([*self._seen(name), *self._opened(mean), *likely])
                yield f"{message}. Possible causes: {causes}" if causes else message

    def _undecided_agents(self, row: Metrics) -> str | None:
        """Return a warning where agents have rewards of their own, and the one that `success` reads tells nothing."""
        rewarded = [r for r in self._rollouts if r.agent_rewards and "env" in r.rewards]
        if len(rewarded) < MIN_AGENT_ROLLOUTS:
            return None
        success = self._config.success
        decides = "env" if success is None else success.function or "env"
        if decides == "env":
            means = [rollout.rewards["env"] or 0.0 for rollout in rewarded]
            differ = any(rollout.agent_rewards != rewarded[0].agent_rewards for rollout in rewarded)
            if not differ or max(means) - min(means) > ROUNDING * max(1.0, abs(means[0])):
                return None
            fault = f"the mean over agents is {means[0]:g} in every rollout of step {row['step']:.0f}"
        elif decides.startswith(AGENT) and not any(decides in rollout.rewards for rollout in rewarded):
            fault = f"no agent of step {row['step']:.0f} has the reward {decides}"
        else:
            return None
        names = sorted({f"{AGENT}{name}" for rollout in rewarded for name in rollout.agent_rewards})
        return (
            f"success: {fault}, so nothing tells right answers; set `success: {{function: NAME, at_least: 1}}` to one "
            f"of {', '.join(names)}"
        )

    def _seen(self, name: str) -> Iterator[str]:
        """Yield what the step's rollouts show about a constant reward: prints of a worker, notes on the environment."""
        printed = [rollout.printed[name] for rollout in self._rollouts if name in rollout.printed]
        if printed:
            yield f"in {len(printed)} of {len(self._rollouts)} rollouts {printed[-1]}"
        if name.partition("/")[0] == "env":
            for note, count in Counter(note for rollout in self._rollouts for note in rollout.notes).most_common(3):
                yield f"in {count} of {len(self._rollouts)} rollouts {note}"

    def _not_asked(self, row: Metrics) -> str | None:
        unasked = [name for name in self._functions if f"rewards/{name}/mean" not in row]
        if "rewards/env/mean" not in row or not unasked:
            return None
        return (
            f"reward_funcs: {', '.join(unasked)} judged no rollout of step {row['step']:.0f}: the environment, or the "
            "agent, gave the rewards; ignore this if that is intended"
        )

    def _opened(self, reward: float) -> Iterator[str]:
        if self._opening and reward <= 0:
            yield (
                f"prompts end in {self._opening}, written by the chat template or the data, so a function that looks "
                "for it in completions does not find it: let it look at the prompt's end and the completion together, "
                "or not ask for the tag"
            )

    def _returned_none(self, row: Metrics) -> str | None:
        unheard = [name for name in self._functions if f"rewards/{name}/mean" not in row]
        if "reward" not in row or "rewards/env/mean" in row:
            return None
        self._silent = Counter({name: self._silent[name] + 1 for name in unheard})
        silent = [name for name, steps in self._silent.items() if steps >= PATIENCE]
        if not silent:
            return None
        return (
            f"reward_funcs: {', '.join(silent)} returned None for every completion of {PATIENCE} steps in a row, so it "
            "adds nothing; ignore this if it is meant for other rows"
        )

    def _causes_of_zero(self, name: str, row: Metrics) -> Iterator[str]:
        """Yield possible causes of a constant 0; those that the run's figures show come first."""
        c = self._config
        clipped = row.get("completions/clipped_ratio", 0.0)
        if clipped > 0:
            keys = [key.removeprefix("truncated/") for key in row if key.startswith("truncated/")]
            at = " and ".join(f"{key} ({getattr(c, key)})" if hasattr(c, key) else key for key in keys)
            yield f"{clipped:.0%} of the completions are cut off at {at}, perhaps before their answer"
        if name in self._in_threads:
            yield (
                "it was given as an object and runs in a thread, where the signals of math-verify's timeouts do not "
                "work: give it by name, 'module:function' or 'file.py:function'"
            )
        if c.stop:
            yield f"completions end at a stop string ({', '.join(map(repr, c.stop))}), perhaps before their answer"
        if not name.startswith("env"):
            yield "the prompt does not ask for the answer format that the function expects"

    def _no_evaluation(self, row: Metrics) -> str | None:
        every, step = self._config.eval_steps, row["step"]
        due = every and (step % every == 0 or step == self._config.max_steps)
        if not due or any(key.startswith("eval/") for key in row):
            return None
        return f"no evaluation ran at step {step:.0f}, where eval_steps={every} schedules one"

    def _no_learning(self, row: Metrics) -> str | None:
        nothing = NO_RATE * self._config.learning_rate
        still = row.get("learning_rate", math.inf) <= nothing > 0 and row["step"] < (1 - LAST) * self._config.max_steps
        self._still = self._still + 1 if still else 0
        if self._still < SAME_STEPS:
            return None
        return (
            f"the learning rate is {row['learning_rate']:.2g} since step {row['step'] - SAME_STEPS + 1:.0f}, of "
            f"{self._config.learning_rate:g} at most: lr_scheduler_type={self._config.lr_scheduler_type} ends training "
            "before max_steps; see lr_scheduler_kwargs, lr_decay_steps and warmup_steps"
        )

    def _near_misses(self, row: Metrics) -> str | None:
        """Return a warning about high rewards below 1, if a reward of 1 is right by default."""
        if self._config.success is not None or "eval/pass@1" not in row:
            return None
        reward, right = row["eval/avg@n"], row["eval/pass@1"]
        if reward - right < MISSED:
            return None
        return (
            f"held-out rewards average {reward:.2f}, but only {right:.0%} reach 1, which counts as right by default. "
            "If right answers get less (a penalty, partial credit), set `success: {at_least: X}`"
        )
