"""Any task of the package reasoning-gym.

Its verifiers evaluate model output, some of it as code. Verifiers and generators therefore run in killable worker
processes; this process never imports the package. Scores are passed through unchanged (a wrong answer often gets 0.01
or 0.05, not 0). An answer on which a verifier raises fails and does not count as wrong.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from functools import lru_cache
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from ..base.dotted import nearest
from ..base.machine import install
from ..base.state import Probability
from ..config.options import CHECKED
from ..env.base import OneTurn, RewardFn
from ..env.rewards.pooled import PooledReward, Row
from ..env.workers.file_cache import making
from ..env.workers.worker import WorkerPool
from ..types import Prompt
from .countdown import extract_answer
from .worked_solutions import VOCABULARY, WORKED, answer_of, chain_sum, chain_sum_prompt

INSTRUCTION = "\n\nThink first, then give only the final answer inside <answer> and </answer> tags."
GENERATE_TIMEOUT_S = 120.0
CHUNK, DEMONSTRATED = 32, 4096
MAX_REPEATS = 8
"""Entries drawn for each one wanted before the task counts as having too few different questions."""


@dataclass(frozen=True, config=CHECKED)
class ReasoningGymConfig:
    """Any generated reasoning task of the package reasoning-gym, scored by its own verifier."""

    task: str
    """Name of the task in reasoning-gym, e.g. `chain_sum`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that task, e.g. `{min_terms: 2}`."""
    train_size: PositiveInt = 1024
    test_size: NonNegativeInt = 128
    seed: int = 0
    prompt_format: Literal["messages", "text", "words"] = "messages"
    """`messages`: chat, answered in `<answer>` tags. `text`: the bare question, answered by the whole completion.
    `words`: for small models trained on worked solutions (chain_sum), answered after the word `answer`."""
    slips: Probability = 0.0
    """Share of carries forgotten in demonstrations, so that a model trained on them can still improve."""

    def __post_init__(self) -> None:
        if self.prompt_format == "words" and self.task != WORKED:
            raise ValueError(f"reasoning_gym: prompt_format: words is there for {WORKED}, not {self.task}")
        if self.slips and self.prompt_format != "words":
            raise ValueError("reasoning_gym: slips are made in demonstrations, which only prompt_format: words has")
        clash = {"seed", "size"} & set(self.options)
        if clash:
            raise ValueError(f"reasoning_gym: options must not set {sorted(clash)}; use seed, train_size and test_size")

    def build(self) -> ReasoningGym:
        return ReasoningGym(self)


class ReasoningGym(OneTurn):
    """Task of reasoning-gym. Raises ValueError if the package is missing, or does not know the task or its options."""

    name = "reasoning_gym"

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config = config
        self.reward_funcs: list[RewardFn] = [reasoning_gym_reward]
        with making("reasoning_gym", 1, GENERATE_TIMEOUT_S) as pool:
            self.test = self._draw(pool, "test", config.test_size, ())
            self.train = self._draw(pool, "train", config.train_size, {p.columns["question"] for p in self.test})

    def answers(self, prompt: Prompt, texts: Sequence[str]) -> list[str | None]:
        """Return answers word for word: the verifiers compare with the reference answer alone."""
        return [_answer(text, prompt.columns) or None for text in texts]

    def demonstrations(self, seed: int) -> Iterator[tuple[str, str]]:
        """Yield worked questions, never of the test; wrong where a slip was made."""
        self._require_words()
        held_out, batch = {p.columns["question"] for p in self.test}, 0
        with making("reasoning_gym", 1, GENERATE_TIMEOUT_S) as pool:
            while True:
                source = self._source(f"demonstrations/{self.config.seed}/{seed}/{batch}", DEMONSTRATED)
                for _, entry in _entries(pool, source):
                    if (question := entry["question"]) not in held_out:
                        yield chain_sum_prompt(question), chain_sum(question, self._slips(seed, question))
                batch += 1

    def _slips(self, seed: int, question: str) -> Callable[[], bool]:
        draws = random.Random(f"{self.config.seed}/{seed}/{question}")
        return lambda: draws.random() < self.config.slips

    def vocabulary(self) -> Sequence[str]:
        self._require_words()
        return VOCABULARY

    def _require_words(self) -> None:
        if self.config.prompt_format != "words":
            raise ValueError("reasoning_gym: only prompt_format: words has demonstrations; use a pretrained model")

    def fingerprint(self) -> str:
        sha = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True, default=str).encode())
        for prompt in (*self.train, *self.test):
            sha.update(prompt.id.encode())
        return sha.hexdigest()

    def _source(self, key: str, size: int) -> dict[str, Any]:
        """Return the source of `size` entries of the task, as a function of `key`."""
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) >> 1
        return {"task": self.config.task, "options": self.config.options, "seed": seed, "size": size}

    def _draw(self, pool: WorkerPool, part: str, wanted: int, excluded: Collection[str]) -> list[Prompt]:
        """Draw prompts with different questions, excluding those in `excluded`."""
        if not wanted:
            return []
        source = self._source(f"{part}/{self.config.seed}", wanted * MAX_REPEATS)
        prompts: list[Prompt] = []
        seen = set(excluded)
        for index, entry in _entries(pool, source):
            if entry["question"] not in seen:
                seen.add(entry["question"])
                prompts.append(self._prompt(len(prompts), entry, source | {"index": index}))
            if len(prompts) == wanted:
                return prompts
        raise ValueError(
            f"reasoning_gym: {wanted} different {part} questions wanted, but {self.config.task} gave only "
            f"{len(prompts)}; lower {part}_size or set options that make it larger"
        )

    def _prompt(self, ordinal: int, entry: Mapping[str, Any], source: dict[str, Any]) -> Prompt:
        question = entry["question"]
        prompt_id = f"{self.config.task}-{hashlib.sha256(question.encode()).hexdigest()[:16]}"
        form = self.config.prompt_format
        columns = {"question": question, "answer": entry["answer"], "source": source, "form": form}
        if form != "messages":
            text = chain_sum_prompt(question) if form == "words" else question
            return Prompt(prompt_id, ordinal, text=text, columns=columns)
        return Prompt(
            prompt_id, ordinal, messages=({"role": "user", "content": question + INSTRUCTION},), columns=columns
        )


def _entries(pool: WorkerPool, source: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    for start in range(0, source["size"], CHUNK):
        stop = min(start + CHUNK, source["size"])
        call = pool.call("winnow.tasks.reasoning_gym:generate", {"source": source, "start": start, "stop": stop})
        yield from enumerate(call.result(), start)


def _arguments(text: str, row: Row) -> dict[str, Any]:
    return {"source": row["source"], "question": row["question"], "answer": _answer(text, row)}


def _answer(text: str, row: Row) -> str | None:
    if row["form"] == "messages":
        return extract_answer(text)
    return answer_of(text) if row["form"] == "words" else text.strip()


reasoning_gym_reward = PooledReward(
    "reasoning_gym_reward", "winnow.tasks.reasoning_gym:score", _arguments, ("question", "source", "form")
)
"""reasoning-gym's own score of the answer."""


# ---------------------------------------------------------------- in the worker


def generate(source: dict[str, Any], start: int, stop: int) -> list[dict[str, Any]]:
    """Return questions and reference answers of entries `start` to `stop`."""
    data = _dataset(json.dumps(source))
    return [{"question": e["question"], "answer": e["answer"]} for e in (data[i] for i in range(start, stop))]


def score(source: dict[str, Any], question: str, answer: str | None) -> float:
    """Return the task's score of an answer. Raises RuntimeError if the entry cannot be made again unchanged."""
    index = source["index"]
    data = _dataset(json.dumps({k: v for k, v in source.items() if k != "index"}))
    entry = data[index]
    if entry["question"] != question:
        raise RuntimeError(f"reasoning-gym task {source['task']} made another question at index {index} than before")
    return float(data.score_answer(answer, entry))


@lru_cache(maxsize=8)
def _dataset(source: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ImportError(f"the package is missing; {install('reasoning-gym')}") from None
    values = json.loads(source)
    if values["task"] not in DATASETS:
        raise ValueError(f"unknown task '{values['task']}'.{nearest(values['task'], list(DATASETS))}")
    return reasoning_gym.create_dataset(values["task"], size=values["size"], seed=values["seed"], **values["options"])
