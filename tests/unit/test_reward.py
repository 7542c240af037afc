"""The reward runner: what functions are given, how their values are combined, overlap, names."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import threading
import warnings

import numpy as np
import pytest
import torch

from winnow.env.rewards.pooled import PooledReward, verl_arguments
from winnow.env.rewards.rewarder import Rewarder
from winnow.record.samples import sample
from winnow.types import Fate, Segment, Turn

from ..builders.rewards import group, scored


def test_text_function_gets_what_it_names_and_nothing_else():
    seen = {}

    def f(completions, prompts, completion_ids, answer, unit="m"):
        seen.update({k: v for k, v in locals().items() if k != "seen"})
        return [1.0, 2.0]

    g = group("a", "b", answer=[4, 2], other="x")
    scored(f, g)
    assert seen == {
        "completions": ["a", "b"],
        "prompts": ["why?", "why?"],
        "completion_ids": [[0, 7], [1, 7]],
        "answer": [[4, 2], [4, 2]],
        "unit": "m",
    }
    assert g.rewards().tolist() == [1.0, 2.0]
    assert g.rollouts[0].rewards == {"f": 1.0}
    assert [r.fate for r in g.rollouts] == [None, None]


@pytest.mark.parametrize("chat", [False, True])
def test_a_rollout_of_several_segments_is_judged_by_all_that_was_sampled(chat):
    seen = []
    g = group("x", chat=chat)
    g.rollouts[0].turns = [Turn("go", None, 0, 1, "eos"), Turn("stop", "end", 1, 2, "eos")]
    g.rollouts[0].later = [Segment(1, (5, 6, 7))]
    scored(lambda completions, completion_ids: seen.extend([*completions, *completion_ids]) or [1], g)
    actions = [{"role": "assistant", "content": text} for text in ("go", "stop")]
    assert seen == [actions if chat else "gostop", [0, 7]]


def test_keyword_function_gets_everything():
    seen = {}

    def f(**kwargs):
        seen.update(kwargs)
        return [0.0]

    rewarder = Rewarder(f)
    rewarder.trainer_state = {"step": 3}
    g = group("a", answer=4)
    rewarder.start(g, environments=["env"])
    assert rewarder.done(wait=True) == [g]
    rewarder.close()
    assert set(seen) == {
        "prompts",
        "completions",
        "completion_ids",
        "answer",
        "environments",
        "trainer_state",
        "log_metric",
        "log_extra",
    }
    assert seen["environments"] == ["env"]
    assert seen["trainer_state"] == {"step": 3}


def test_conversational_completions_are_messages():
    def f(prompts, completions):
        assert prompts[0] == [{"role": "user", "content": "why?"}]
        return [float(len(c[0]["content"])) if c[0]["role"] == "assistant" else -1.0 for c in completions]

    g = group("a", "bb", chat=True)
    scored([f], g)
    assert g.rewards().tolist() == [1.0, 2.0]


def test_turns_of_a_conversation_are_messages_with_what_was_answered():
    seen = []
    g = group("x", chat=True)
    g.rollouts[0].turns = [Turn("go", "seen", 0, 1, "eos"), Turn("stop", "end", 1, 2, "eos")]
    scored(lambda completions: seen.extend(completions) or [1], g)
    assert seen == [
        [
            {"role": "assistant", "content": "go"},
            {"role": "user", "content": "seen"},
            {"role": "assistant", "content": "stop"},
        ]
    ]


def test_weighted_sum_over_functions_that_apply():
    def a(completions):
        return [1.0, None, None]

    def b(completions):
        return [0.5, 0.5, None]

    g = group("x", "y", "z")
    scored([a, b], g, weights=[2.0, -1.0])
    np.testing.assert_array_equal(g.rewards(), [1.5, -0.5, np.nan])
    assert g.rollouts[1].rewards == {"a": None, "b": 0.5}
    assert g.rollouts[2].fate is Fate.FAILED
    assert g.rollouts[2].reason == "no reward function applied"


@pytest.mark.parametrize(
    "value",
    [
        [1, 0.5, True],
        (1.0, 0.5, 1.0),
        np.array([1.0, 0.5, 1.0]),
        torch.tensor([1.0, 0.5, 1.0]),
        [np.float32(1), torch.tensor(0.5), np.bool_(True)],
        [torch.tensor([1.0]), np.array([0.5]), np.int64(1)],
    ],
    ids=["list", "tuple", "numpy", "torch", "scalars", "one-element arrays"],
)
def test_kinds_of_numbers(value):
    g = group("x", "y", "z")
    scored(lambda completions: value, g)
    assert g.rewards().tolist() == [1.0, 0.5, 1.0]


def test_coroutines_run_side_by_side():
    together = 0
    most = 0

    async def slow(completions):
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.05)
        together -= 1
        return [1.0] * len(completions)

    class Judge:
        __name__ = "judge"

        async def __call__(self, completions):
            return [2.0] * len(completions)

    groups = [group("x", "y", number=i) for i in range(8)]
    scored([slow, Judge()], *groups)
    assert all(g.rewards().tolist() == [3.0, 3.0] for g in groups)
    assert most == 8


def test_scoring_overlaps_the_caller_and_comes_back_once():
    gate = threading.Event()

    def f(completions):
        assert gate.wait(20)
        return [1.0]

    rewarder = Rewarder(f)
    first, second = group("x"), group("y", number=1)
    rewarder.start(first)
    rewarder.start(second)
    assert rewarder.done() == []
    with pytest.raises(ValueError, match="being scored already"):
        rewarder.start(first)
    with pytest.raises(RuntimeError, match="collect them"):
        rewarder.score([group("z")])
    gate.set()
    back = rewarder.done(wait=True)
    while len(back) < 2:
        back += rewarder.done(wait=True)
    assert back[0] is first
    assert back[1] is second
    assert rewarder.done() == rewarder.done(wait=True) == []
    rewarder.close()


def test_only_rollouts_without_fate_and_reward_are_scored():
    seen = []
    g = group("failed", "env", "open")
    g.rollouts[0].fate = Fate.FAILED
    g.rollouts[1].reward = 0.25
    scored(lambda completions: seen.extend(completions) or [1.0], g)
    assert seen == ["open"]
    np.testing.assert_array_equal(g.rewards(), [np.nan, 0.25, 1.0])
    done = group("failed")
    done.rollouts[0].fate = Fate.PRUNED
    scored(lambda completions: 1 / 0, done)
    assert done.rollouts[0].fate is Fate.PRUNED


def test_without_functions_nothing_applies():
    g = group("x")
    scored([], g)
    assert g.rollouts[0].reason == "no reward function applied"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Reward functions in an importable module and a file; they tell their process."""
    source = """
import os
import numpy as np
import asyncio

def length(completions, bonus, log_metric):
    log_metric("pid", os.getpid())
    return np.array([len(c) + b for c, b in zip(completions, bonus)])

async def later(completions):
    await asyncio.sleep(0)
    return [0.5 for _ in completions]

async def one_later(text):
    return float(len(text))

def everything(**kwargs):
    kwargs["log_extra"]("step", [kwargs["trainer_state"].global_step] * 2)
    return [float(len(kwargs))] * len(kwargs["completions"])

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        raise ValueError("cannot parse")
    return {"score": float(solution_str == ground_truth), "acc": 1, "source": data_source, "extra": extra_info}

VALUE = 3
"""
    (tmp_path / "my_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "my_rewards.py"


def test_functions_by_name_run_in_another_process(module):
    g = group("a", "bb", bonus=10)
    rewarder = scored(["my_rewards:length", f"{module}:later", "my_rewards:everything"], g)
    assert g.rollouts[1].rewards == {"length": 12.0, "later": 0.5, "everything": 7.0}
    assert [r.extra for r in g.rollouts] == [{"step": 0}, {"step": 0}]
    assert rewarder.pop_metrics()["pid"] != os.getpid()
    assert rewarder.pop_metrics() == {}


def test_metrics_are_averaged():
    def f(completions, log_metric):
        for completion in completions:
            log_metric("length", len(completion))
        return [0.0] * len(completions)

    assert scored(f, group("a", "bbb")).pop_metrics() == {"length": 2.0}


def test_columns_of_log_extra_are_kept_with_the_rollouts():
    def f(completions, log_extra, log_metric):
        log_extra("length", [len(c) for c in completions])
        log_extra("odd", np.array([1.5, float("nan")]))
        return [0.0, 0.0]

    g = group("a", "bbb")
    scored(f, g)
    assert [r.extra for r in g.rollouts] == [{"length": 1, "odd": 1.5}, {"length": 3, "odd": "nan"}]
    assert sample(0, g, "train")["extra"] == {"length": 1, "odd": 1.5}

    def short(completions, log_extra):
        log_extra("length", [1])
        return [0.0, 0.0]

    failed = group("a", "b")
    scored(short, failed)
    assert "column 'length' has 1 values for 2 completions" in failed.rollouts[0].reason
    assert "extra" not in sample(0, failed, "train")


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", ["judge", "Judge", "bound", "hidden"])
def test_async_verl_functions(tmp_path, kind, by_name):
    """Awaited, on one event loop for all calls, whatever hides that they are async."""
    file = tmp_path / "judges.py"
    file.write_text(
        "import asyncio, functools\n"
        "loops = []\n"
        "async def judge(data_source, solution_str, ground_truth, extra_info=None, factor=1):\n"
        "    loops.append(asyncio.get_running_loop())\n"
        "    assert loops[0] is loops[-1]\n"
        "    await asyncio.sleep(0)\n"
        "    if solution_str == 'bad': raise ValueError('cannot parse')\n"
        "    return {'score': factor * float(solution_str == ground_truth)}\n"
        "class _Judge:\n"
        "    async def __call__(self, data_source, solution_str, ground_truth, extra_info):\n"
        "        return solution_str == ground_truth\n"
        "Judge = _Judge()\n"
        "bound = functools.partial(functools.partial(judge, factor=1), extra_info=None)\n"
        "def hidden(data_source, solution_str, ground_truth, extra_info):\n"
        "    return judge(data_source, solution_str, ground_truth)\n"
    )
    namespace: dict = {}
    exec(file.read_text(), namespace)
    g = group("42", "41", "bad", data_source="x", ground_truth="42")
    scored(f"{file}:{kind}" if by_name else namespace[kind], g)
    expected = [1.0, 0.0, 0.0 if kind == "Judge" else np.nan]
    np.testing.assert_array_equal(g.rewards(), expected, err_msg=str([r.reason for r in g.rollouts]))


def test_targets_of_pooled_rewards_and_hidden_coroutines_are_awaited(module):
    reward = PooledReward("later", f"{module}:one_later", lambda text, row: {"text": text}, ())
    assert reward(completions=["x", "yy"]) == [1.0, 2.0]

    async def later(completions):
        return [3.0]

    g = group("a")
    scored([lambda completions: later(completions)], g)
    assert g.rollouts[0].reward == 3.0


def guarded(completions):
    """As open-r1's and others' do with math-verify: what raises is worth 0."""
    try:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return [1.0]
    except ValueError:
        return [0.0]


def test_functions_that_need_signals_are_named_where_these_do_not_work(tmp_path):
    with pytest.warns(UserWarning, match=r"reward guarded: it sets a signal handler.*give it by name"):
        scored(guarded, group("a"))
    by_name, file = group("a"), tmp_path / "rewards.py"
    file.write_text(f"import signal\n\n\n{inspect.getsource(guarded)}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored(f"{file}:guarded", by_name)
    assert by_name.rollouts[0].reward == 1.0

    async def unguarded(completions):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    g = group("a")
    with pytest.warns(UserWarning, match="reward unguarded"):
        scored(unguarded, g)
    assert re.search(r"reward unguarded: ValueError: signal only works.*give it by name", g.rollouts[0].reason)
    assert signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM)) == signal.getsignal(signal.SIGALRM)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", ["judge", "value_of"])
def test_ground_truths_that_are_no_text_reach_functions_as_they_are(tmp_path, kind, by_name):
    file = tmp_path / "judges.py"
    file.write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(str(ground_truth) == solution_str)\n"
        "def value_of(completions, ground_truth):\n"
        "    return [float(str(g) == c) for g, c in zip(ground_truth, completions)]\n"
    )
    namespace: dict = {}
    exec(file.read_text(), namespace)
    for value in ({"target": 16, "numbers": [3, None]}, ["Lyon", "Nice"], 4, 4.5, True):
        g = group(str(value), "no", data_source="x", ground_truth=value)
        scored(f"{file}:{kind}" if by_name else namespace[kind], g)
        assert g.rewards().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("by_name", [True, False])
def test_verl_functions(module, by_name):
    if by_name:
        function = f"{module}:compute_score"
    else:
        namespace: dict = {}
        exec(module.read_text(), namespace)
        function = namespace["compute_score"]
    g = group("42", "41", "bad", chat=True, data_source="gsm8k", reward_model={"style": "rule", "ground_truth": "42"})
    scored(function, g)
    np.testing.assert_array_equal(g.rewards(), [1.0, 0.0, np.nan])
    assert "cannot parse" in g.rollouts[2].reason
    bare = group("42", data_source="gsm8k")
    scored(function, bare)
    assert "ground_truth" in bare.rollouts[0].reason


def test_built_in_names():
    g = group("3 + 5 = 8 , 8 * 2 = 16", "no", numbers=[2, 3, 5], target=16, style="steps")
    rewarder = scored("countdown", g)
    assert g.rewards().tolist() == [1.0, 0.0]
    assert rewarder.names == ["countdown_reward"]


def test_equal_names_are_told_apart():
    g = group("x")
    scored([lambda completions: [1.0], lambda completions: [2.0]], g)
    assert g.rollouts[0].rewards == {"<lambda>": 1.0, "<lambda>_2": 2.0}


def test_pooled_reward_has_trls_signature(module):
    reward = PooledReward("length", "builtins:float", lambda text, row: {}, ())
    with pytest.raises(ValueError, match="reward_model"):
        PooledReward("v", f"{module}:compute_score", verl_arguments)(completions=["42"])
    assert reward(prompts=["p", "p"], completions=["x", "y"]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("countdwon", "unknown name 'countdwon'.*countdown"),
        ("my_rewards:lenght", "Did you mean 'length'"),
        ("my_reward:length", "Did you mean 'my_rewards'"),
        ("my_rewards:VALUE", "not a function"),
        ("nowhere/rewards.py:length", "no such file"),
        (":length", "expected 'module:name'"),
        (3, "expected a function or its name"),
    ],
)
def test_functions_that_do_not_exist_are_errors_at_start(module, spec, message):
    with pytest.raises(ValueError, match=message):
        Rewarder([spec])


def test_weights_must_match():
    with pytest.raises(ValueError, match="give one each"):
        Rewarder([lambda completions: [1]], [1.0, 2.0])
    with pytest.raises(ValueError, match="give one each"):
        Rewarder([lambda completions: [1]], [float("nan")])


def test_missing_columns_are_found_before_and_during_a_run():
    def f(completions, answer):
        return [1.0]

    rewarder = Rewarder(f)
    rewarder.check(["answer", "more"])
    with pytest.raises(ValueError, match=r"needs a column 'answer'.*Did you mean 'answers'"):
        rewarder.check(["answers"])
    for argument in ("prompt", "completion"):
        singular = Rewarder(eval(f"lambda {argument}, completions, **columns: [1.0]"))
        with pytest.raises(ValueError, match=rf"'{argument}' is no argument or column; write '{argument}s', a list"):
            singular.check(["answer"])
        singular.check(["answer", argument])
        singular.close()
    g = group("x", answers=1)
    rewarder.score([g])
    rewarder.close()
    assert g.rollouts[0].fate is Fate.FAILED
    assert "needs a column 'answer'" in g.rollouts[0].reason


@pytest.mark.parametrize("arguments", ["max_length, cache", "ngrams=3", ""])
def test_a_factory_is_no_reward_function(arguments):
    namespace: dict = {}
    exec(f"def get_penalty({arguments}): return lambda completions: [0.0]", namespace)
    rewarder = Rewarder(namespace["get_penalty"])
    with pytest.raises(ValueError, match=r"reward get_penalty: .*call it in a file, `mine = get_penalty\(...\)`"):
        rewarder.check(["answer"])
    rewarder.close()
