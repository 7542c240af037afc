"""A task and a model so small that a whole run takes a fraction of a second, and in which every method can act.

Six prompts: one always solved, one never, four with a mixture, of which one has an environment that sometimes fails.
Every other prompt is a chat, whose template drops what an assistant said before `w2`, as some drop thoughts.
In one of them two agents take turns, each with a history and a reward of its own.
Three turns of up to four tokens, of which many end early: at a stop string, by the environment, or because the tokens
are used up. The environment gives actions in normal form, progress and rewards, and two types of task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from winnow.env.base import StepResult
from winnow.env.prompting import NextMessages
from winnow.types import Message, Prompt

PROMPTS = 6
WORDS = [f"w{i}" for i in range(50)]
STOPS = ("w1",)
"""One word in six: `w1` and `w10` to `w19`."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content.split('w2')[-1] }} {% else %}{{ m.content }} "
    "{% endif %}{% endfor %}"
)
OBSERVATIONS = [f"o{i}" for i in range(4)]


def make_model(directory: Path) -> None:
    """A random Llama of two layers with a vocabulary of 64 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<eos>", "<unk>", *WORDS, *OBSERVATIONS, *(f"p{i}" for i in range(PROMPTS))]
    words += [f"u{i}" for i in range(64 - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    fast.save_pretrained(directory)


def load_model(directory: Path) -> tuple[Callable[[], Any], Any]:
    """A function that gives a fresh copy of the model each time, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    return lambda: deepcopy(model), AutoTokenizer.from_pretrained(directory)


def write_profile(file: Path) -> None:
    """Pass rates of the prompts but one, two of them outside of any band."""
    counts = [4, 0, 2, 1, 3]
    lines = (f'{{"id": "q{i}", "n": 4, "correct": {c}, "mean_reward": {c / 4}}}\n' for i, c in enumerate(counts))
    file.write_text("".join(lines))


@dataclass(frozen=True)
class WorldConfig:
    """The tiny task of the sweep over pairs of options."""

    sharing: bool = False
    agents: bool = True

    def build(self) -> World:
        return World(sharing=self.sharing, agents=self.agents)


@dataclass
class World:
    on_step: Callable[[], None] | None = None
    """Called at every step of an environment: the middle of a rollout."""
    sharing: bool = False
    """Whether the rollouts of one prompt share two places, and are paid at a limit."""
    agents: bool = True
    """Whether two agents take turns at one prompt."""
    alike: bool = False
    """Whether all prompts begin with the same two words."""
    name: str = "world"
    train: Sequence[Prompt] = field(init=False)
    test: Sequence[Prompt] = field(init=False)
    reward_funcs: Sequence[Any] = ()
    max_turns: int = 3
    max_turn_length: int = 4
    stop: tuple[str, ...] = STOPS

    def __post_init__(self) -> None:
        beginning = "o3 o3 " if self.alike else ""
        self.train = _prompts(0, PROMPTS, beginning)
        self.test = _prompts(PROMPTS, PROMPTS + 2, beginning)

    def make_env(self, prompt: Prompt) -> WorldEnv | Sharing:
        number = int(prompt.columns["number"])
        if self.sharing and number == 2:
            return Sharing(self, number)
        return TwoAgents(self, number) if number == 3 and self.agents else WorldEnv(self, number)

    def fingerprint(self) -> str:
        return "world"


def _prompts(start: int, stop: int, beginning: str) -> list[Prompt]:
    """Prompts of training (numbers below `PROMPTS`) or of the test."""
    prompts = []
    for i in range(start, stop):
        text, columns = f"{beginning}p{i % PROMPTS} o{i // PROMPTS}", {"number": i, "task_type": "xy"[i % 2]}
        asked: Any = {"messages": ({"role": "user", "content": text},)} if i % 2 else {"text": text}
        prompts.append(Prompt(f"q{i}", i - start, columns=columns, **asked))
    return prompts


class WorldEnv:
    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.steps = self.total = 0

    def reset(self) -> str | None:
        return " o0"

    def step(self, text: str) -> StepResult:
        if self.world.on_step is not None:
            self.world.on_step()
        self.steps += 1
        value = int.from_bytes(blake2b(f"{self.number} {self.steps} {text}".encode()).digest()[:4])
        self.total += value
        if self.number == 5 and self.steps > 1 and value % 5 == 0:
            raise ConnectionError("the simulator went away")
        reward = {0: 1.0, 1: 0.0}.get(self.number, float(self.total % 2))
        if self.number == 4 and not reward:
            reward = 0.25 * (value % 2)
        progress = min(1.0, 0.25 * (self.total % 4))
        return StepResult(f" o{value % 4}", reward, value % 7 == 0, {"progress": progress}, "abc"[value % 3])


class TwoAgents(WorldEnv):
    """Agent `a` asks, `b` with a prompt of its own, and `a` again, with its earlier history."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.history: list[Message] = []

    def reset(self) -> str:
        self.history.append(_user(f"p{self.number} o0"))
        return NextMessages(self.history, continues=None, whole=self.history, agent="a")

    def step(self, text: str) -> StepResult:
        found = super().step(text)
        assert found.observation is not None
        asked = _user(found.observation)
        if self.steps == 1:
            self.history += [{"role": "assistant", "content": text}, asked]
            request = NextMessages([asked], continues=None, whole=[asked], agent="b")
        else:
            request = NextMessages([asked], continues=0, whole=self.history, agent="a")
        rewards = {"a": found.reward, "b": 1.0 - found.reward if self.total % 3 else found.reward}
        return replace(found, observation=request, reward=rewards)


class Sharing:
    """An environment in other threads. All of them share two places; each keeps its own from reset to close."""

    places = threading.Semaphore(2)

    def __init__(self, world: World, number: int) -> None:
        self._env = WorldEnv(world, number)
        self._lock = threading.Lock()
        self._holds = self._closed = False

    def start_reset(self) -> Future[str | None]:
        return _in_thread(self._reset)

    def start_step(self, text: str) -> Future[StepResult]:
        return _in_thread(lambda: replace(self._env.step(text), reward=None))

    def start_reward(self) -> Future[float]:
        return _in_thread(lambda: float(self._env.total % 2))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._holds:
                self.places.release()

    def _reset(self) -> str | None:
        if not self.places.acquire(timeout=30):
            raise TimeoutError("no place came free")
        with self._lock:
            self._holds = True
            if self._closed:
                self.places.release()
        return self._env.reset()


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
