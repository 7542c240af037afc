"""Pass-rate profiles: what is counted, what a file may hold, and that an interrupted one ends as any other."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from winnow.config import validate
from winnow.env.rewards.rewarder import Rewarder
from winnow.methods.pass_rates import BINS, PassRate, ProfileError, histogram, parse_profile, read_profile, summary
from winnow.methods.success import Success, default_success
from winnow.rollout.evaluate import run_jobs
from winnow.rollout.profile import CHUNK, Profiler
from winnow.rollout.runner import RolloutRunner
from winnow.run.build import build_policy
from winnow.run.inputs import build_task
from winnow.run.resolve import resolve_here
from winnow.run.resolved import rollout_options, sampling_params

LINE = {"id": "a", "n": 16, "correct": 3, "mean_reward": 0.1875}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# the file


def test_a_line_has_exactly_four_keys_and_comes_back() -> None:
    rate = PassRate("p-1", 16, 3, 0.1875)
    assert json.loads(rate.line()) == LINE | {"id": "p-1"}
    assert list(json.loads(rate.line())) == ["id", "n", "correct", "mean_reward"]
    assert rate.rate == 3 / 16


def test_read_profile_keeps_order_and_odd_ids(tmp_path: Path) -> None:
    rates = [PassRate(i, 4, 2, -0.5) for i in ("z", "a\n\u2028b", "ü🙂", "\x00")]
    path = write(tmp_path / "p.jsonl", *(r.line() for r in rates))
    assert list(read_profile(path).values()) == rates


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"correct": 17}, "correct must be 0 to n=16, got 17"),
        ({"correct": -1}, "correct: Input should be greater than or equal to 0 (got -1)"),
        ({"n": 0, "correct": 0}, "n: Input should be greater than 0 (got 0)"),
        ({"n": 16.0}, "n: Input should be a valid integer (got 16.0)"),
        ({"n": True, "correct": 1}, "n: Input should be a valid integer (got True)"),
        ({"correct": None}, "correct: Input should be a valid integer (got None)"),
        ({"mean_reward": math.nan}, "mean_reward: Input should be "),
        ({"mean_reward": -math.inf}, "mean_reward: Input should be greater than or equal to -1"),
        ({"mean_reward": 10**400}, "mean_reward: Input should be "),
        ({"mean_reward": "0.5"}, "mean_reward: Input should be a valid number"),
        ({"id": ""}, "id: String should have at least 1 character"),
        ({"id": 7}, "id: Input should be a valid string"),
        ({"rate": 0.2}, "unknown key 'rate'. Known: correct, id"),
    ],
)
def test_a_bad_value_names_file_line_and_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "p.jsonl", LINE | {"id": "good"}, LINE | change)
    with pytest.raises(ProfileError, match=r"p\.jsonl, line 2: ") as raised:
        read_profile(path)
    assert message in str(raised.value)


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(
    "line",
    [
        '{"id": "a", "n": 16, "corr',
        "[1, 2]",
        "7",
        "[" * 100_000,
        '{"id": "a"}',
        "\udcff",
    ],
)
def test_what_is_no_line_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(LINE | {"id": "good"}).encode() + b"\n" + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(ProfileError, match="line 2"):
        read_profile(path)


def test_twice_the_same_is_fine_and_two_truths_are_not(tmp_path: Path) -> None:
    assert list(read_profile(write(tmp_path / "p.jsonl", LINE, LINE))) == ["a"]
    with pytest.raises(ProfileError, match=r"line 3: id 'a' has 4 of 16 correct .* 3 of 16 .* line 1"):
        read_profile(write(tmp_path / "p.jsonl", LINE, "", LINE | {"correct": 4}))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="winnow pass-rates"):
        read_profile(tmp_path / "p.jsonl")
    with pytest.raises(ProfileError, match="holds no pass rate"):
        read_profile(write(tmp_path / "p.jsonl", ""))
    assert parse_profile(b"", tmp_path) == {}


def test_histogram_is_exact_at_the_edges() -> None:
    assert len(BINS) == 12
    for n in range(1, 41):
        for c in range(n + 1):
            (found,) = (i for i, count in enumerate(histogram([PassRate("x", n, c, 0.0)])) if count)
            if c in (0, n):
                assert found == (0 if c == 0 else 11)
            else:
                assert 10 * c <= found * n
                assert 10 * c > (found - 1) * n


def test_summary_adds_up() -> None:
    draw = random.Random(0)
    rates = [PassRate(str(i), 8, draw.randint(0, 8), 0.0) for i in range(200)]
    s = summary(rates)
    assert s["dead"] + s["solved"] + s["in_band"] == s["profiled"] == 200
    assert s["dead"] == sum(r.correct == 0 for r in rates)
    assert s["mean_pass_rate"] == pytest.approx(sum(r.correct for r in rates) / 1600)
    assert summary([])["mean_pass_rate"] is None


# the profiler


def by_parity(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(c.split()) % 2) for c in completions]


def some_fail(completions: list[str], numbers: list[list[int]], **columns: Any) -> list[Any]:
    """Every rollout of a prompt whose first number is even fails, and the others' odd-length ones."""
    if numbers[0][0] % 2 == 0:
        raise RuntimeError("not today")
    return [ValueError("odd") if len(c.split()) % 2 else 2.0 for c in completions]


class Bench:
    """An engine on the tiny model, and what profiles on it."""

    def __init__(self, tiny_model: Path) -> None:
        self.config = validate(
            {
                "model": str(tiny_model),
                "env": {"name": "countdown", "train_size": 2 * CHUNK + 3, "test_size": 4},
                "max_prompt_length": 16,
                "max_completion_length": 6,
                "threads": 1,
            }
        )
        self.task = build_task(self.config.env)
        self.policy, self.engine = build_policy(resolve_here(self.config))

    def profiler(self, reward: Any = by_parity, seed: int = 0) -> Profiler:
        self.rewarder = Rewarder(reward)
        options = rollout_options(self.config.model_copy(update={"seed": seed}))
        runner = RolloutRunner(self.engine, self.task, self.policy.tokenizer, self.rewarder, options)
        return Profiler(lambda jobs: run_jobs(runner, jobs))

    def run(self, profiler: Profiler, prompts: Any, **options: Any) -> Iterator[PassRate]:
        return profiler.run(prompts, **{"n": 4} | options)

    def rates(self, prompts: Any, **options: Any) -> list[PassRate]:
        return list(self.run(self.profiler(), prompts, **options))


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Bench:
    return Bench(tiny_model)


def test_profiles_are_keyed_by_prompt_and_epoch(bench: Bench) -> None:
    prompts = bench.task.train
    whole = bench.rates(prompts)
    assert [r.id for r in whole] == [p.id for p in prompts]
    assert bench.rates(prompts) == whole
    assert bench.rates(prompts[CHUNK : 2 * CHUNK]) == whole[CHUNK : 2 * CHUNK]
    assert bench.rates(prompts[::-1]) == whole[::-1]
    assert len({(r.correct, r.n) for r in whole}) > 2, "a profile in which every prompt is alike tests nothing"
    again = bench.rates(prompts, epoch=1)
    assert again != whole
    assert bench.rates(prompts, epoch=1) == again
    assert list(bench.run(bench.profiler(seed=1), prompts)) != whole


def test_failed_rollouts_are_no_zeros(bench: Bench) -> None:
    prompts = bench.task.train[:40]
    profiler = bench.profiler(some_fail)
    rates = {r.id: r for r in bench.run(profiler, prompts, success=Success(at_least=2.0))}
    dead = {p.id for p in prompts if p.columns["numbers"][0] % 2 == 0}
    assert dead
    assert dead <= set(profiler.unjudged)
    assert not dead & set(rates)
    assert "not today" in profiler.unjudged[next(iter(dead))]
    assert set(rates) | set(profiler.unjudged) == {p.id for p in prompts}
    assert any(r.n < 4 for r in rates.values())
    assert all(r.correct == r.n and r.mean_reward == 2.0 for r in rates.values())
    assert profiler.rollouts == 160
    assert 160 <= profiler.tokens <= 160 * 6
    assert profiler.seconds > 0


def double(completions: list[str], **columns: Any) -> list[float]:
    return [2.0] * len(completions)


def test_a_profile_ends_where_right_answers_become_unknown(bench: Bench) -> None:
    profiler = bench.profiler(double)
    assert list(bench.run(profiler, bench.task.train, success=default_success(["double"], None))) == []
    assert profiler.rollouts == 4 * CHUNK
    assert "a reward of 2, above 1" in profiler.unjudged[bench.task.train[0].id]


def test_a_busy_engine_and_no_samples_are_refused(bench: Bench) -> None:
    from winnow.engine.base import Request

    with pytest.raises(ValueError, match="n: must be at least 1"):
        next(bench.run(bench.profiler(), bench.task.train, n=0))
    bench.engine.submit([Request("mine", (2, 3), sampling_params(bench.config), key=0)])
    with pytest.raises(RuntimeError, match="still has 1 other"):
        next(bench.run(bench.profiler(), bench.task.train))
    bench.engine.cancel(["mine"])


def test_nothing_is_in_flight_while_the_caller_has_a_result(bench: Bench) -> None:
    for _ in bench.run(bench.profiler(), bench.task.train[: CHUNK + 1]):
        assert bench.engine.pending == 0
