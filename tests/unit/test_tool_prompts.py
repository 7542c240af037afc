"""Prompts with tools and results of tools as token ids, with a real tokenizer and chat templates."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from winnow.env.prompting import NextMessages, PromptError, encode_observation, encode_prompt
from winnow.env.tools import with_tools
from winnow.types import Prompt

from ..builders.tools import (
    TEMPLATE,
    OneTurn,
    add,
    make_tokenizer,
    tokenizer,  # noqa: F401
)


def test_prompts_show_the_tools_and_the_first_observation_ends_the_last_message(tokenizer):
    prompt = with_tools(OneTurn(), [add]).train[0]
    text = tokenizer.decode(encode_prompt(tokenizer, prompt, " Start at 3."))
    assert text.startswith('<s>system\n{"type": "function", "function": {"name": "add"')
    assert text.endswith("<s>user\nCount. Start at 3.<e>\n<s>assistant\n")
    assert prompt.messages[0]["content"] == "Count."
    assert pickle.loads(pickle.dumps(prompt)) == prompt


def test_a_prompt_of_parts_has_tools_and_a_first_observation_as_well(tokenizer):
    prompt = with_tools(OneTurn(), [add]).train[0]
    parts = replace(prompt, messages=({"role": "user", "content": [{"type": "text", "text": "Count."}]},))
    for observation in (None, " Start at 3."):
        assert encode_prompt(tokenizer, parts, observation) == encode_prompt(tokenizer, prompt, observation)


def test_results_continue_the_conversation_exactly(tokenizer):
    """What was sampled plus the results' tokens equals the template applied to the whole conversation."""
    prompt = with_tools(OneTurn(), [add]).train[0]
    arguments = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": a}} for a in arguments]
    results = [{"role": "tool", "name": "add", "content": str(a["a"] + a["b"])} for a in arguments]
    said = "".join(f"<tool_call>{json.dumps(c['function'])}</tool_call>" for c in calls)
    messages = [*prompt.messages, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    whole = tokenizer.apply_chat_template(
        messages, tools=list(prompt.tools), tokenize=False, add_generation_prompt=True
    )
    for answer in (said + "<e>", said):
        sampled = np.array(tokenizer.encode(answer, add_special_tokens=False))
        added = encode_observation(tokenizer, prompt, NextMessages(results), sampled)
        assert tokenizer.decode([*encode_prompt(tokenizer, prompt), *sampled.tolist(), *added]) == whole


def test_results_survive_copies():
    results = NextMessages([{"role": "tool", "name": "add", "content": "3"}])
    for other in (copy.deepcopy(results), pickle.loads(pickle.dumps(results))):
        assert (other, other.messages) == ("3", results.messages)


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (TEMPLATE.replace("{{ t | tojson }}", ""), "offer"),
        (TEMPLATE.replace("{{ c.function | tojson }}", "{{ c.function.name }}"), "key, value"),
        (TEMPLATE.replace("<s>tool {{ m.name }}\n{{ m.content }}", "<s>tool {{ m.name }}"), "result"),
        ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", "offer"),
    ],
)
def test_templates_that_hide_something_are_refused(template, missing):
    prompt = with_tools(OneTurn(), [add]).train[0]
    with pytest.raises(PromptError, match=rf"prompt 'p0' has tools, but .* leaves out their {missing}"):
        encode_prompt(make_tokenizer(template), prompt)


def test_templates_that_hide_a_call_once_it_is_answered_are_refused():
    hides = TEMPLATE.replace("m.tool_calls or []", "((m.tool_calls or []) if answers == 0 else [])")
    hides = "{% set answers = messages | selectattr('role', 'equalto', 'tool') | list | length %}" + hides
    tokenizer = make_tokenizer(hides)
    results = NextMessages([{"role": "tool", "name": "add", "content": "3"}])
    prompt = Prompt("p0", 0, messages=({"role": "user", "content": "Count."},))
    with pytest.raises(PromptError, match=r"prompt 'p0': .* cannot join turns: .* leaves out what the assistant said"):
        encode_observation(tokenizer, prompt, results, np.array([1]))


def trl_template(name):
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


RESULT = "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_results_follow_qwens_own_end_of_turn(name, eos):
    """Qwen3's own template shows an empty thought before a last call only; the tokenizer of a base model ends texts
    otherwise than its template ends turns."""
    tokenizer = make_tokenizer(trl_template(name))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|endoftext|>"]})
    tokenizer.eos_token = eos
    prompt = with_tools(OneTurn(), [add]).train[0]
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)).endswith("<|im_start|>assistant\n")
    results = NextMessages([{"role": "tool", "name": "add", "content": "3"}])
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    for said, expected in ((call + "<|im_end|>", "\n" + RESULT), (call, "<|im_end|>\n" + RESULT)):
        sampled = np.array(tokenizer.encode(said, add_special_tokens=False))
        assert tokenizer.decode(encode_observation(tokenizer, prompt, results, sampled)) == expected


@pytest.mark.parametrize(
    ("name", "special", "said", "expected"),
    [
        ("glm4moe", ["<|observation|>", "<|user|>"], "</tool_call><|observation|>", "\n<tool_response>\n3"),
        ("glm4moe", ["<|observation|>", "<|user|>"], "</tool_call>", "<|observation|>\n<tool_response>\n3"),
        ("gptoss", ["<|call|>", "<|start|>", "<|end|>"], "{}<|call|>", "<|start|>functions.add to=assistant"),
        ("gptoss", ["<|call|>", "<|start|>", "<|end|>"], "{}", "<|call|><|start|>functions.add to=assistant"),
        ("gemma4", ["<|tool_response>", "<turn|>"], "<tool_call|><|tool_response>", "response:add"),
        ("llama3_1", ["<|eot_id|>"], "{}<|eot_id|>", "<|start_header_id|>ipython"),
    ],
)
def test_results_where_a_call_ends_otherwise(name, special, said, expected):
    tokenizer = make_tokenizer(trl_template(name))
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    prompt = with_tools(OneTurn(), [add]).train[0]
    encode_prompt(tokenizer, prompt)
    results = NextMessages([{"role": "tool", "name": "add", "content": "3"}])
    sampled = np.array(tokenizer.encode(said, add_special_tokens=False))
    assert tokenizer.decode(encode_observation(tokenizer, prompt, results, sampled)).startswith(expected)


def test_tools_choose_the_template_for_tools():
    tokenizer = make_tokenizer({"default": "{{ raise_exception('no tools') }}", "tool_use": TEMPLATE})
    prompt = with_tools(OneTurn(), [add]).train[0]
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)).endswith("Count.<e>\n<s>assistant\n")
    results = NextMessages([{"role": "tool", "name": "add", "content": "3"}])
    for observation in (results, "more"):
        added = tokenizer.decode(encode_observation(tokenizer, prompt, observation, np.array([], int)))
        assert added.startswith("<e>\n<s>tool add\n3" if observation is results else "<e>\n<s>user\nmore")


def test_the_same_tokens_as_trl():
    """TRL's own template of Qwen3, and TRL's own way to find the tokens of a result."""
    trl = pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer

    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(template.replace("<|im_end|>", "<e>"))
    prompt = with_tools(OneTurn(), [add]).train[0]
    messages = [{"role": "tool", "name": "add", "content": c} for c in ("3", "4")]
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None, chat_template_kwargs={}
    )
    theirs = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    sampled = np.array(tokenizer.encode("x<e>", add_special_tokens=False))
    assert encode_observation(tokenizer, prompt, NextMessages(messages), sampled) == theirs
    asked = tokenizer.apply_chat_template(
        list(prompt.messages), tools=[add], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(encode_prompt(tokenizer, prompt)) == asked
