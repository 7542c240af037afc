"""Definition of a right answer, shared by evaluations, selectors, gates, statistics and stop conditions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..base.errors import ConfigError
from ..types import Rollout

TOLERANCE = 1e-8
PUNISHMENT = "soft_overlong"
"""The punishment of `soft_overlong_cache`, which makes no answer wrong."""
REMEDY = "set `success: {function: NAME, at_least: 1}` to the reward function that decides, or `success: {at_least: X}`"
AGENT = "env/"
"""Beginning of the names of agents' own rewards."""


@dataclass
class Success:
    """A rollout is right when its reward, or that of one reward function or agent, is at least `at_least`.

    By default right means a reward of 1 if that is plausible: a single reward function without a weight that never
    gives more. Otherwise right answers are unknown: no pass@k is reported, equal rewards are neither easy nor hard, and
    no run ends as solved.
    """

    function: str | None = None
    """Name of the deciding reward function, or `env/` and the name of an agent; None: the weighted sum of all."""
    at_least: float = 1.0
    declared: bool = True
    """Whether the user set `success` in the configuration."""
    undecided: str = ""
    """Why right answers are unknown; empty when they are known."""

    def right(self, rollout: Rollout) -> bool | None:
        """Return whether a rollout is right; None when it has no reward, or right answers are unknown."""
        value = rollout.reward
        if self.function is not None:
            shared = self.function.startswith(AGENT) and not rollout.agent_rewards  # one reward is that of all agents
            value = rollout.rewards.get("env" if shared else self.function)
        if rollout.reward is None or value is None or self.undecided:
            return None
        return value >= self.at_least - TOLERANCE

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        """Look for a reward above the default maximum, which shows that the default is not the user's intent."""
        if self.declared or self.undecided:
            return
        highest = max((r.reward for r in rollouts if r.reward is not None), default=self.at_least)
        if highest > self.at_least + TOLERANCE:
            self.undecided = f"a reward of {highest:g}, above {self.at_least:g}"

    def require(self, what: str = "success: this command counts right answers") -> None:
        """Raise ConfigError when right answers are unknown; the message begins with `what`."""
        if self.undecided:
            raise ConfigError(f"{what}, but success is {self}")

    def __str__(self) -> str:
        if self.undecided:
            return f"undecided ({self.undecided}); {REMEDY}"
        return f"{self.function or 'reward'} >= {self.at_least:g}" + ("" if self.declared else " (the default)")


def default_success(functions: Sequence[str], weights: Sequence[float] | None) -> Success:
    """Return the default success rule. `functions`: names of the reward functions; empty: the environment gives the
    reward."""
    judges = [name for name in functions if name != PUNISHMENT]
    undecided = ""
    if len(judges) > 1:
        undecided = f"{len(judges)} reward functions: {', '.join(judges)}"
    elif weights is not None and list(weights) != [1.0] * len(judges):
        undecided = f"reward_weights: {list(weights)}"
    return Success(judges[0] if judges and judges != list(functions) else None, declared=False, undecided=undecided)
