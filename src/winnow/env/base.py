"""Task protocol: prompts, and either reward functions (one turn) or a single-use environment (many turns)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..types import Message, Prompt

RewardFn = Callable[..., "list[float | None]"]
"""TRL's signature: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async.

Only the arguments it names are passed (all of them if it takes `**kwargs`). For text prompts, `prompts` and
`completions` are strings; with several turns a completion is all actions joined, without observations. For
conversational prompts they are lists of messages: the assistant's turns (with `tool_calls` if the environment parsed
some) and the observations in between. A stop string is part of a completion. `completion_ids` has all tokens after the
prompt, including observations. `None` means "not applicable".
"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to one action. Raises TypeError for invalid fields."""

    observation: str | None
    reward: float | Mapping[str, float] | None = None
    """Reward so far; the last one counts. If all are None, the reward functions decide; without those it is 0.
    A mapping gives each of several agents its own."""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """Known key: `progress`, the share of the task done, in [0, 1], which gates can read."""
    action: str | None = None
    """The action in the environment's own normal form, compared by gates; None: the text before a stop string."""
    message: Message | None = None
    """The action as a chat message with its `tool_calls`, passed to reward functions in its place."""

    def __post_init__(self) -> None:
        if not isinstance(self.action, str | None):
            raise TypeError(f"StepResult: action must be a text or None, not {type(self.action).__name__}")
        if not isinstance(self.info, Mapping):
            raise TypeError(f"StepResult: info must be a mapping, not {type(self.info).__name__}")
        if isinstance(self.done, str) or isinstance(self.reward, str):
            raise TypeError("StepResult: done must be true or false and reward a number, not texts")
        if isinstance(self.reward, Mapping) and not self.reward:
            raise TypeError("StepResult: reward must name at least one agent, not be an empty mapping")

    @property
    def progress(self) -> float | None:
        """Return `info["progress"]`. Raises TypeError or ValueError unless it is a number in [0, 1]."""
        progress = self.info.get("progress")
        if progress is not None and not 0 <= float(progress) <= 1:
            raise ValueError(f"{progress} is not in [0, 1]")
        return None if progress is None else float(progress)


class ModelTurn(str):
    """The model's output in one turn, as passed to environments."""

    stop_reason: str
    """`eos`, `stop` or, for a cut-off turn, `length`."""
    stop_string: str
    """The stop string that the text ends with, or empty text."""
    whole: str
    """The text with every special token, for parsers of tool calls."""
    prompt_tokens: int
    """Tokens that the model had before this turn."""
    tokens: int
    """Tokens that it sampled."""

    def __new__(
        cls,
        text: str,
        stop_reason: str,
        stop_string: str = "",
        whole: str | None = None,
        prompt_tokens: int = 0,
        tokens: int = 0,
    ) -> ModelTurn:
        turn = super().__new__(cls, text)
        turn.stop_reason, turn.stop_string = stop_reason, stop_string
        turn.whole = text if whole is None else whole
        turn.prompt_tokens, turn.tokens = prompt_tokens, tokens
        return turn


def before_stop(text: str) -> str:
    """Return the text before the stop string. A command, for example, does not include its end mark."""
    return text.removesuffix(getattr(text, "stop_string", ""))


@dataclass(frozen=True, slots=True)
class EnvReport:
    """The attribute `winnow_report` of Winnow's own environments; without it, these defaults hold."""

    label: str = "the environment"
    """Its name in messages."""
    agents: set[str] | None = None
    """Names under which agents asked, answered or not; None if there are no agents."""
    abandoned: Sequence[int] = ()
    """Numbers of turns that nobody waited for, which are not trained."""
    notes: Sequence[str] = ()
    """See `Rollout.notes`."""
    environment: Any = None
    """State for reward functions, one of their `environments`."""


@runtime_checkable
class Env(Protocol):
    """An environment for one rollout: built for one sibling, reset once, stepped until done.

    An optional method `close()` is called once, when the rollout has ended for any reason. Methods may be async: other
    rollouts then continue meanwhile, for up to 600 s.
    """

    def reset(self) -> str | None:
        """Return the first observation, appended to the prompt, or None."""
        ...

    def step(self, text: str) -> StepResult:
        """Execute the sampled text, a `ModelTurn`, which includes a stop string; return the environment's answer."""
        ...


@runtime_checkable
class OverlappingEnv(Protocol):
    """An environment in another process or thread, so that the engine continues with other rollouts meanwhile.

    Its futures must finish within a timeout of its own; an exception fails the rollout. `close()` works as for `Env`,
    possibly while an answer is pending. An optional `start_reward()` gives a future of the reward, or None, for a
    rollout that a limit ends: out of turns, segments or tokens. An action that the limit cuts is not stepped.
    `winnow.env.workers.remote` puts any `Env` into a worker process. An optional `winnow_report` is an `EnvReport`.

    An optional attribute `independent = True` says that no answer ever waits for another rollout (for a lock or a
    place in a pool that it holds). Answers are then waited for in order, however long they take, so a run repeats bit
    for bit; else only while some answer arrives within a second.
    """

    def start_reset(self) -> Future[str | None]:
        """Start `Env.reset`."""
        ...

    def start_step(self, text: str) -> Future[StepResult]:
        """Start `Env.step`."""
        ...


@runtime_checkable
class Task(Protocol):
    """Prompts, and how their completions are scored. Built from `env:` in the config.

    A task of many turns may have `max_turn_length`, the most tokens sampled in one turn. A turn that reaches it has the
    stop reason `length` and is passed to the environment unchanged. A task whose environments always give the reward
    should have `rewards_itself = True`: reward functions of a user, which would never be asked, are then refused.
    One with environments that give none should have `needs_reward_funcs = True`: a run without any is then refused.
    """

    name: str
    train: Sequence[Prompt]
    test: Sequence[Prompt]
    """Held out; disjoint from `train` by content. May be empty."""
    reward_funcs: Sequence[RewardFn]
    """Default reward functions. Empty if the environment gives the reward."""
    max_turns: int
    stop: tuple[str, ...]
    """Strings that end a turn, in addition to those of the config; a tuple, also of one."""

    def make_env(self, prompt: Prompt) -> Env | OverlappingEnv | None:
        """Return a fresh environment for one rollout, which may change its prompt's columns; None for one turn."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that decides prompts and rewards; a resume refuses a changed one."""
        ...


class OneTurn:
    """Base of tasks without an environment."""

    max_turns = 1
    stop: tuple[str, ...] = ()

    def make_env(self, prompt: Prompt) -> None:
        return None


def has_no_environment(task: Task) -> bool:
    """Return whether prompts are all that the policy is asked."""
    return getattr(task.make_env, "__func__", None) is OneTurn.make_env


@runtime_checkable
class Answering(Protocol):
    """A task that extracts answers from completions, for `winnow vote`."""

    def answers(self, prompt: Prompt, texts: Sequence[str]) -> list[str | None]:
        """Return the answer of each completion: equal texts for equal answers, None without one."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """A task that provides solutions, for `winnow warm-start`."""

    def demonstrations(self, seed: int) -> Iterator[tuple[str, str | list[str]]]:
        """Yield (prompt, completion) pairs without end, never of a test prompt.

        For many turns, the prompt includes the first observation, and the completion is a list: action, observation,
        action and so on, ending with an action.
        """
        ...

    def vocabulary(self) -> Sequence[str]:
        """Return every word a demonstration can contain, for a word-level tokenizer."""
        ...
