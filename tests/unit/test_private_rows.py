"""Rows, messages and completions are private to a rollout and to a reward function."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.env.base import StepResult
from winnow.env.dataset import DatasetConfig
from winnow.env.private import LARGE_ARRAY, private
from winnow.env.tools import with_tools
from winnow.tasks.agents import with_agent
from winnow.types import Turn

from ..builders.asking import ask
from ..builders.rewards import group, scored
from ..builders.tool_calls import call
from ..builders.tool_rollouts import roll
from ..builders.tools import OneTurn, add, make_tokenizer
from ..builders.toy_rollouts import ToyTask, policy, run  # noqa: F401

LONG = [{"n": [i]} for i in range(200)]
WIDE = {str(i): [i] for i in range(200)}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize(
    "value",
    ["text", 3, None, ("a", 1), [1, "b"], [[1], {"a": {"b": [2]}}], {"a": [1]}, {1, 2}, ([1], {"b": 2}), LONG, WIDE],
    ids=lambda value: str(value)[:20],
)
def test_a_copy_is_equal_and_of_the_same_kind(value):
    copied = private(value)
    assert copied == value
    assert isinstance(copied, type(value))
    assert json.dumps(copied, default=list) == json.dumps(value, default=list)
    assert type(pickle.loads(pickle.dumps(copied))) is type(copy.deepcopy(copied)) is type(value)


@pytest.mark.parametrize("original", [LONG, WIDE], ids=["list", "dict"])
def test_what_is_inside_is_private_too(original):
    before, copied = copy.deepcopy(original), private(original)
    if isinstance(copied, list):
        copied[3]["n"].append("changed")
    else:
        copied["3"].append("changed")
    assert original == before


def test_arrays_are_copied_or_read_only():
    small, large = np.zeros(3), np.zeros(LARGE_ARRAY // 8 + 1)
    private({"a": small})["a"][0] = 1
    assert small[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        private([large])[0][0] = 1
    large[0] = 1  # its owner may


def test_what_contains_itself_is_copied_too():
    loop: list[Any] = [[1]]
    loop.append(loop)
    copied = private(loop)
    copied[0].append(2)
    assert loop[0] == [1]


def test_what_cannot_be_copied_is_shared_and_the_rest_is_not():
    lock = threading.Lock()
    row = {"lock": lock, "module": json, "todo": ["a"]}
    copied = private(row)
    copied["todo"].pop()
    assert (copied["lock"], copied["module"], row["todo"]) == (lock, json, ["a"])


# ---------------------------------------------------------------- rollouts


def nested():
    return {"history": [{"role": "system", "content": "Be brief."}], "todo": ["a", "b"], "table": copy.deepcopy(LONG)}


def test_agents_do_not_see_what_their_siblings_changed(tokenizer):
    begun = []

    async def agent(base_url, prompt, history, table, **row):
        begun.append((len(prompt), len(history), row["todo"].pop(), len(table[0]["n"])))
        prompt[0]["content"] = "changed"
        history.append({"role": "user", "content": "Go."})
        table[0]["n"].append(1)
        return ask(base_url, history)["content"] == "yes"

    task = with_agent(OneTurn(nested()), agent)
    for _ in range(2):  # the next epoch
        rollouts, _ = roll(tokenizer, task, [["yes"], ["no"], ["yes"]])
        assert [r.reward for r in rollouts] == [1.0, 0.0, 1.0]
    assert begun == [(1, 1, "b", 1)] * 6
    assert task.train[0].columns == nested()


class Shop:
    """An environment that changes its row."""

    def reset(self, prompt, todo, history, **row):
        self.todo, self.left = todo, (len(todo), len(prompt[0]), row["table"][0]["n"].pop())
        history.clear()
        prompt[0].clear()

    def take(self, names: list) -> str:
        """
        Takes something.

        Args:
            names: What.
        """
        return f"{self.todo.pop()} {names.pop()}"


def test_environments_and_tools_do_not_either(tokenizer):
    seen = []

    def judge(completions, environments, todo, **row):
        seen.append([e.left for e in environments])
        arguments = [c[0]["tool_calls"][0]["function"]["arguments"] for c in completions]
        environments.clear()
        for messages in (*completions, *todo):
            messages.clear()
        return [float(given == {"names": ["x"]}) for given in arguments]

    def second(completions, environments, todo):
        return [len(c) + len(e.todo) + len(t) for c, e, t in zip(completions, environments, todo, strict=True)]

    task = with_tools(OneTurn(nested()), [add], Shop)
    script = [[call("take", names=["x"]), "Done."] for _ in range(2)]
    rollouts, texts = roll(tokenizer, task, script, [judge, second])
    assert [r.rewards for r in rollouts] == [{"judge": 1.0, "second": 3 + 1 + 2}] * 2
    assert seen == [[(2, 2, 0)] * 2]
    assert "b x" in texts[-1]
    assert task.train[0].columns == nested()


def test_an_environment_of_ones_own_may_change_its_prompt(policy):
    begun = []

    class Own:
        def __init__(self, prompt):
            self.prompt = prompt

        def reset(self):
            begun.append(list(self.prompt.columns["todo"]))
            self.prompt.columns["todo"].clear()
            self.prompt.columns.clear()

        def step(self, text):
            return StepResult(None, 1.0, done=True)

    task = ToyTask()
    task.train = DatasetConfig("x").with_rows([{"prompt": f"numbers {i} :", "todo": ["a"]} for i in range(3)]).train
    task.make_env = Own  # type: ignore[method-assign]
    run(policy, task)
    assert begun == [["a"]] * 12


def test_rows_that_cannot_be_stored_are_as_they_were_at_the_next_visit():
    lock = threading.Lock()
    task = DatasetConfig("x").with_rows([{"prompt": [{"role": "user", "content": "?"}], "lock": lock, "todo": [1]}])
    before = task.fingerprint()
    first = task.train[0]
    first.columns["todo"].append(2)
    first.messages[0]["content"] = "changed"
    again = task.train[0]
    assert (again.columns, again.messages) == ({"lock": lock, "todo": [1]}, ({"role": "user", "content": "?"},))
    task._fingerprint = None
    assert task.fingerprint() == before


# ---------------------------------------------------------------- reward functions


def test_each_reward_function_has_its_own_arguments():
    seen = []

    def greedy(prompts, completions, completion_ids, **columns):
        seen.append(copy.deepcopy((prompts, completions, completion_ids, columns["todo"], columns["table"][0][0])))
        for values in (*prompts, *completions, *completion_ids, *columns["todo"]):
            values.pop()
        columns["table"][0][0]["n"].append(1)
        columns["todo"].clear()
        return [1.0, 2.0]

    async def later(**arguments):
        return greedy(**arguments)

    g = group("a", "b", chat=True, todo=[["x"]], table=LONG)
    g.rollouts[0].turns = [Turn("a", None, 0, 1, "eos", message={"role": "assistant", "content": "", "tool_calls": []})]
    scored([greedy, later, greedy], g)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][4] == {"n": [0]}
    assert g.rollouts[0].turns[0].message == {"role": "assistant", "content": "", "tool_calls": []}
    assert g.prompt.columns == {"todo": [["x"]], "table": LONG}


def test_siblings_do_not_share_a_column_within_a_call():
    def judge(todo):
        todo[0].append(1)
        return [len(each) for each in todo]

    g = group("a", "b", todo=[])
    scored(judge, g)
    assert g.rewards().tolist() == [1.0, 0.0]


def test_verls_functions_have_their_own_row():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        extra_info["seen"].append(solution_str)
        ground_truth.append("more")
        return float(len(extra_info["seen"]) + len(ground_truth))

    g = group("a", "b", data_source="x", ground_truth=["4"], extra_info={"seen": []})
    scored([compute_score, compute_score], g)
    assert g.rewards().tolist() == [6.0, 6.0]


def test_functions_by_name_have_too(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(
        "def judge(completions, todo):\n    todo[0].append(1)\n    return [len(t) for t in todo]\n"
    )
    g = group("a", "b", todo=[])
    scored([f"{tmp_path}/rewards.py:judge"] * 2, g)
    assert g.rewards().tolist() == [2.0, 0.0]
