"""Columns that are part of the prompt: given to the chat template, read by a preset, or refused by name."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from winnow import ConfigError, Trainer
from winnow.engine.template import with_template_values
from winnow.env.prompt_columns import is_empty
from winnow.env.prompting import PromptError, encode_observation, encode_prompt, with_messages
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.row_files import DataError
from winnow.env.tools import with_tools
from winnow.integrations.trl_data import TrlRows
from winnow.run.preflight import check_rewards
from winnow.study.warm_start import WarmStartConfig, warm_start
from winnow.tasks.agents import with_agent

from ..builders.datasets import build, build_rows, write
from ..builders.tokenizers import CHATML, chat_model, chat_tokenizer

__all__ = ["chat_model"]

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% if thinking is defined and not thinking %}[nothink]{% endif %}" + CHATML
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
ASKED = [{"role": "user", "content": "how warm is it?"}]


def shown(row: dict[str, Any], tokenizer: Any = None, **options: Any) -> str:
    """Return the first prompt as the model sees it."""
    tokenizer = tokenizer or chat_tokenizer(TEMPLATE)
    return str(tokenizer.decode(encode_prompt(tokenizer, build_rows([row], **options).train[0])))


@pytest.mark.parametrize("given", [[WEATHER], json.dumps([WEATHER]), [json.dumps(WEATHER)], [WEATHER["function"]]])
def test_tools_of_a_row_are_in_its_prompt(given):
    found = shown({"prompt": ASKED, "tools": given})
    assert '"name": "weather"' in found.partition("<|im_start|>")[0]
    assert build_rows([{"prompt": ASKED, "tools": given}]).train[0].columns["tools"] == given


@pytest.mark.parametrize("value", [None, "", [], float("nan"), np.float32("nan"), np.float64("nan")])
def test_a_column_with_nothing_in_it_is_empty(value):
    assert is_empty(value)


@pytest.mark.parametrize("value", [0, 0.0, np.float32(0), False, "x", [None]])
def test_a_column_with_a_value_is_not(value):
    assert not is_empty(value)


def test_keys_that_parquet_adds_are_not_shown(tmp_path):
    other = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "zone": "x"}}}
    rows = [
        {"prompt": ASKED, "tools": [WEATHER], "chat_template_kwargs": {"thinking": False}},
        {"prompt": ASKED, "tools": [other], "chat_template_kwargs": {"style": "x"}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = build(tmp_path / "a.parquet").train
    assert second.template_values == {"tools": [other], "style": "x"}
    assert first.template_values["thinking"] is False
    assert "style" not in first.template_values
    assert "zone" not in json.dumps(first.template_values)


def test_variables_of_a_row_reach_the_template_in_every_turn():
    plain, quiet = {"prompt": ASKED}, {"prompt": ASKED, "chat_template_kwargs": {"thinking": False}}
    assert shown(quiet) == "[nothink]" + shown(plain)
    assert shown({**plain, "chat_template_kwargs": json.dumps({"thinking": False})}) == shown(quiet)
    assert shown({**plain, "chat_template_kwargs": {"thinking": None}}) == shown(plain)
    tokenizer = chat_tokenizer(CHATML + "{% if thinking %}[think]{% endif %}")
    prompt = build_rows([{**plain, "chat_template_kwargs": {"thinking": True}}]).train[0]
    assert tokenizer.decode(encode_prompt(tokenizer, with_messages(prompt, ASKED))).endswith("[think]")
    added = encode_observation(tokenizer, prompt, "and now?", np.array([], np.int64))
    assert tokenizer.decode(added).endswith("[think]")


def test_a_row_overrides_the_configuration():
    tokenizer = with_template_values(chat_tokenizer(TEMPLATE), {"thinking": False})
    assert shown({"prompt": ASKED}, tokenizer).startswith("[nothink]")
    assert not shown({"prompt": ASKED, "chat_template_kwargs": {"thinking": True}}, tokenizer).startswith("[nothink]")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"chat_template_kwargs": {"thinkin": 1}},
            "chat_template_kwargs: 'thinkin': the chat template does not use it",
        ),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "'add_generation_prompt': the chat template does"),
        ({"tools": [WEATHER]}, "tools: the chat template does not use it"),
    ],
)
def test_what_the_template_does_not_show_is_refused(columns, message):
    template = CHATML if "tools" in columns else TEMPLATE
    with pytest.raises(PromptError, match=message):
        shown({"prompt": ASKED, **columns}, chat_tokenizer(template))


def test_a_template_that_only_counts_tools_is_refused():
    with pytest.raises(PromptError, match="tools: the chat template leaves out weather; use a model or chat_template"):
        shown({"prompt": ASKED, "tools": [WEATHER]}, chat_tokenizer("{{ tools | length }}" + CHATML))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "chat_template_kwargs": {"a": 1}}, "column 'chat_template_kwargs' is for a chat template"),
        ({"prompt": ASKED, "tools": [shown]}, "'tools' must be a list of JSON schemas of functions, found"),
        ({"prompt": ASKED, "tools": {"weather": 1}}, "'tools' must be a list of JSON schemas of functions, found"),
        ({"prompt": ASKED, "chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object of template"),
        ({"prompt": ASKED, "chat_template_kwargs": {"tools": []}}, "tools and messages have columns of their own"),
    ],
)
def test_other_values_are_refused_with_their_row(row, message):
    with pytest.raises(DataError, match=f"train_dataset, row 1: .*{message}"):
        build_rows([row])


@pytest.mark.parametrize(
    "row", [{"prompt": "hi", "tools": [WEATHER]}, {"prompt": "hi", "tools": "x"}, {"prompt": ASKED, "tools": ["look"]}]
)
def test_tools_that_no_template_can_show_are_a_column(row):
    """An agent or a reward function may read them; else they would be left out."""
    task = build_rows([row])
    assert not task.train[0].template_values
    assert task.unshown_columns.keys() == {"tools"}
    agents = with_agent(task, lambda prompt, tools: float(tools == row["tools"]))
    check_rewards(agents, agents.train[0], Rewarder([]))
    with pytest.raises(ConfigError, match="the model would not be given column 'tools'"):
        check_rewards(task, task.train[0], Rewarder([lambda completions: [1.0]]))
    check_rewards(task, task.train[0], Rewarder([lambda completions, tools: [1.0]]))


@pytest.mark.parametrize("columns", [{"tools": None}, {"tools": []}, {"tools": ""}, {"chat_template_kwargs": {}}])
def test_empty_columns_are_nothing(columns):
    assert build_rows([{"prompt": "hi", **columns}]).train[0].template_values == {}


def test_prompts_differ_by_what_the_template_gets():
    """With nothing for the template, ids are those of the messages alone."""
    rows = [{"prompt": ASKED}, {"prompt": ASKED, "tools": [WEATHER]}]
    rows.append({"prompt": ASKED, "chat_template_kwargs": {"thinking": False}})
    task = build_rows(rows)
    assert len({prompt.id for prompt in task.train}) == 3
    assert not any("-" in prompt.id for prompt in task.train)
    assert task.train[0].id == build_rows(rows[:1]).train[0].id
    with pytest.raises(DataError, match="1 of 1 prompts are also in the training data"):
        build_rows(rows).config.with_rows(rows, rows[1:2])


def test_tools_next_to_those_that_run_are_refused():
    def clock() -> str:
        """Return the time."""
        return "noon"

    with pytest.raises(ValueError, match="column 'tools' offers tools that with_tools cannot run"):
        with_tools(build_rows([{"prompt": ASKED, "tools": [WEATHER]}]), [clock])


def test_an_agent_offers_its_own_tools():
    """Its requests keep the row's other values for the template."""
    row = {"prompt": ASKED, "tools": [WEATHER], "chat_template_kwargs": {"thinking": False}}
    (prompt,) = with_agent(build_rows([row]), lambda prompt, tools: 1.0).train
    assert prompt.template_values == {"thinking": False}
    assert prompt.columns["tools"] == [WEATHER]


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        ({"tools": [WEATHER]}, r"column 'tools' to the chat template; give tools=\[\.\.\.\] to the trainer"),
        (
            {"chat_template_kwargs": {"a": 1}},
            "column 'chat_template_kwargs' to .* give chat_template_kwargs in",
        ),
    ],
)
def test_trl_shows_neither_and_is_said_to(columns, remedy):
    with pytest.warns(UserWarning, match=f"train_dataset, row 2: TRL's GRPOTrainer does not give {remedy}"):
        TrlRows([{"prompt": ASKED}, {"prompt": ASKED, **columns}], environments=False)


# ---- columns next to the prompt


def plain(completions, **columns):
    return [1.0 for _ in completions]


def reads_input(completions, input, **columns):
    return [1.0 for _ in completions]


def check(task: Any, *functions: Any) -> None:
    rewarder = Rewarder(list(functions))
    try:
        check_rewards(task, task.train[0], rewarder)
    finally:
        rewarder.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("system", "Be brief."),
        ("history", [["a", "b"]]),
        ("input", "cat"),
        ("documents", ["x"]),
        ("system_prompt", "s"),
    ],
)
def test_columns_next_to_the_prompt_are_refused_by_name(tmp_path, column, value):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", column: value})
    message = rf"a\.jsonl, line 2: the model would not be given column '{column}'.*preset: alpaca.*name it among"
    with pytest.raises(ConfigError, match=message):
        check(build(path), plain)


def test_a_column_that_a_reward_function_names_is_only_a_column():
    task = build_rows([{"prompt": "a", "input": "1 2", "system": ""}])
    check(task, plain, reads_input)
    assert task.train[0].columns["input"] == "1 2"
    with pytest.raises(ConfigError, match="column 'input'"):
        check(task, plain)


def test_the_prompts_own_column_may_have_any_name():
    check(build_rows([{"input": "a"}], prompt_column="input"), plain)


def test_agents_and_environments_get_all_columns():
    class Room:
        def reset(self, **row: Any) -> None:
            self.system = row["system"]

        def look(self) -> str:
            """Look around."""
            return "dark"

    rows = [{"prompt": ASKED, "system": "Be brief."}]
    check(with_agent(build_rows(rows), lambda prompt, system: 1.0), plain)
    check(with_tools(build_rows(rows), environment_factory=Room), plain)
    with pytest.raises(ConfigError, match="column 'system'"):
        check(with_tools(build_rows(rows), [Room().look]), plain)


def test_a_run_and_a_warm_start_refuse_them(tmp_path, chat_model):
    rows = [{"prompt": f"say {i}", "input": "cat", "answer": "x"} for i in range(4)]
    with pytest.raises(ConfigError, match="train_dataset, row 1: the model would not be given column 'input'"):
        Trainer(
            model=str(chat_model),
            train_dataset=rows,
            reward_funcs=plain,
            config={"output_dir": str(tmp_path / "run"), "max_steps": 1, "threads": 1},
        )
    with pytest.raises(ConfigError, match="warm start: train_dataset, row 1: the model would not be given column"):
        warm_start(build_rows(rows), tmp_path / "warm", config=WarmStartConfig(max_steps=1))


def test_a_chat_with_its_solution_is_named():
    """A turn begun in a prompt is meant to be continued."""
    rows = [{"messages": ASKED}, {"messages": [*ASKED, {"role": "assistant", "content": "20 degrees."}]}]
    with pytest.warns(UserWarning, match="row 2: 'messages' ends in an assistant's turn, as in 1 of 2 rows, and"):
        build_rows(rows, prompt_column="messages")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_rows([{"prompt": rows[1]["messages"]}])


# ---- presets


def test_alpaca():
    row = {"instruction": "Translate.", "input": "cat", "output": "chat", "system": "Be brief."}
    row["history"] = [["Hello", "Hi"]]
    task = build_rows([row, {"instruction": "Sing.", "input": "", "output": None}], preset="alpaca")
    first, second = task.train
    assert [(m["role"], m["content"]) for m in first.messages] == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hi"),
        ("user", "Translate.\ncat"),
    ]
    assert first.columns["ground_truth"] == "chat"
    assert first.columns["input"] == "cat"
    assert second.messages == ({"role": "user", "content": "Sing."},)
    assert task.reward_funcs == []
    check(task, plain)


def test_sharegpt():
    turns = [("system", "s"), ("human", "hi"), ("gpt", "hello"), ("human", "bye"), ("gpt", "ciao")]
    row = {"conversations": [{"from": who, "value": said} for who, said in turns], "tools": json.dumps([WEATHER])}
    (prompt,) = build_rows([row], preset="sharegpt").train
    assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.columns["ground_truth"] == "ciao"
    assert prompt.template_values == {"tools": [WEATHER]}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"instruction": "a", "history": ["b"]},
            {"preset": "alpaca"},
            "'history' must be a list of",
        ),
        (
            {"conversations": [{"from": "tool", "value": "x"}]},
            {"preset": "sharegpt"},
            "a turn is from 'tool', not one of",
        ),
        ({"conversations": "x"}, {"preset": "sharegpt"}, "'conversations' must be a list of"),
        ({"instruction": "a", "output": "b"}, {}, "no column 'prompt' .* or use preset: alpaca"),
        ({"conversations": []}, {}, "no column 'prompt' .* or use preset: sharegpt"),
        (
            {"conversations": [{"from": "human", "value": "x"}]},
            {"prompt_column": "conversations"},
            "use preset: sharegpt",
        ),
    ],
)
def test_rows_of_other_formats_name_the_preset(row, options, message):
    with pytest.raises(DataError, match=message):
        build_rows([row], **options)
