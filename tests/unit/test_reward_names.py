"""Reward functions by name, in workers: modules, files, async and verl's form."""

from __future__ import annotations

import inspect
import os
import re
import signal
import warnings

import numpy as np
import pytest

from winnow.env.rewards.pending import numbered
from winnow.env.rewards.pooled import PooledReward, failing_alone, failures_of, verl_arguments
from winnow.env.rewards.rewarder import Rewarder
from winnow.record.samples import sample
from winnow.types import Fate

from ..builders.rewards import group, score_all, scored


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
    assert rewarder.pop_logged()["pid"] != os.getpid()
    assert rewarder.pop_logged() == {}


def test_metrics_are_averaged():
    def f(completions, log_metric):
        for completion in completions:
            log_metric("length", len(completion))
        return [0.0] * len(completions)

    assert scored(f, group("a", "bbb")).pop_logged() == {"length": 2.0}


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


@pytest.mark.parametrize(
    ("names", "distinct"),
    [
        (["f", "f", "f_2"], ["f", "f_3", "f_2"]),
        (["f", "f_2", "f", "f_2"], ["f", "f_2", "f_3", "f_2_2"]),
        (["f", "f", "f"], ["f", "f_2", "f_3"]),
    ],
)
def test_numbered_names_are_distinct(names, distinct):
    assert numbered(names) == distinct


def test_a_pooled_reward_that_fails_alone(module):
    """As inside TRL: an error of one completion, or of one row, takes no score from the others."""
    reward = PooledReward("score", f"{module}:compute_score", verl_arguments)
    function, other = failing_alone([reward, len])
    assert (function.__name__, other) == ("score", len)
    assert failing_alone(reward).__name__ == "score"
    assert failing_alone(None) is None
    rows = {"reward_model": [{"ground_truth": "42"}, {"ground_truth": "42"}, {}], "trainer_state": None}
    assert function(completions=["42", "bad", "42"], **rows) == [1.0, None, None]
    failed = failures_of([function, other])
    assert failed.keys() == {1, 2}
    assert "reward score: ValueError: cannot parse" in failed[1]
    assert "ground_truth" in failed[2]
    assert function(completions=["42"], ground_truth=["41"]) == [0.0]
    assert failures_of([function]) == {}


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
        with pytest.raises(ValueError, match=rf"needs a column '{argument}'.*Did you mean '{argument}s'"):
            singular.check(["answer"])
        singular.check(["answer", argument])
        singular.close()
    g = group("x", answers=1)
    score_all(rewarder, [g])
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
