from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from winnow.env.prompting import (
    PromptError,
    TurnTexts,
    cut_at_stop,
    decode,
    decode_whole,
    encode_observation,
    encode_prompt,
    stop_string_of,
)
from winnow.types import Prompt

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with a ChatML-like template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return tokenizer_of(backend, TEMPLATE)


def tokenizer_of(backend: Tokenizer, template: str, eos: str = "<e>", **options: str) -> PreTrainedTokenizerFast:
    special = ["<s>", "<end>", "<return>", "<user>", "<eom>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend.to_str()),
        eos_token=eos,
        additional_special_tokens=special,
        **options,
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str) -> Prompt:
    roles = ["user", "assistant"] * len(contents)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False))
    return Prompt("p", 0, messages=messages)


def test_text_and_messages(chat_tokenizer) -> None:
    text = Prompt("t", 0, text="hi ✓")
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, text, " there")) == "hi ✓ there"
    ids = encode_prompt(chat_tokenizer, chat("2+2?"), "go")
    assert chat_tokenizer.decode(ids) == "<s>user\n2+2?<e>\n<s>user\ngo<e>\n<s>assistant\n"


def test_an_observation_continues_the_conversation_exactly(chat_tokenizer) -> None:
    """What was sampled plus the observation's tokens equals the template applied to the whole conversation."""
    prompt = chat("2+2?")
    start = encode_prompt(chat_tokenizer, prompt)
    for answer in ("4<e>", "4"):
        sampled = np.array(chat_tokenizer.encode(answer, add_special_tokens=False))
        added = encode_observation(chat_tokenizer, prompt, "right", sampled)
        whole = chat_tokenizer.decode([*start, *sampled.tolist(), *added])
        assert whole == "<s>user\n2+2?<e>\n<s>assistant\n4<e>\n<s>user\nright<e>\n<s>assistant\n"


LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} <e>{% endif %}{% endfor %}"
)
LAST_ENDS_OTHERWISE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}"
    "{{ '<return>' if loop.last and m.role == 'assistant' else '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
NEXT_ROLE_ENDS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<s>"
TWO_MARKS = TEMPLATE.replace("<e>", "<eom><end>")
TEXT_MARK = TEMPLATE.replace("<e>", "\n#END#")
NEW_LINE_MARK = TEMPLATE.replace("<e>", "\n<end>")


@pytest.mark.parametrize(
    ("template", "sampled", "whole"),
    [
        (LLAMA2, "4<e>", "4<e><s>[INST] right [/INST]"),
        (LLAMA2, "4 <e>", "4 <e><s>[INST] right [/INST]"),
        (LLAMA2, "4", "4 <e><s>[INST] right [/INST]"),
        (LLAMA2, "4 ", "4  <e><s>[INST] right [/INST]"),  # a blank by chance, with which the end begins
        (NEW_LINE_MARK, "4\n", "4\n\n<end>\n<s>user\nright\n<end>\n<s>assistant\n"),
        (NEW_LINE_MARK, "4\n<end>", "4\n<end>\n<s>user\nright\n<end>\n<s>assistant\n"),
        (TEXT_MARK, "4\n#END#", "4\n#END#\n<s>user\nright\n#END#\n<s>assistant\n"),
        (TEXT_MARK, "4\n", "4\n\n#END#\n<s>user\nright\n#END#\n<s>assistant\n"),
        (TWO_MARKS, "4<eom>", "4<eom><end>\n<s>user\nright<eom><end>\n<s>assistant\n"),
        (TWO_MARKS, "4<end>", "4<end>\n<s>user\nright<eom><end>\n<s>assistant\n"),
        (LAST_ENDS_OTHERWISE, "4<return>", "4<return><s>user:right<end><s>assistant:"),
        (LAST_ENDS_OTHERWISE, "4<end>", "4<end><s>user:right<end><s>assistant:"),
        (LAST_ENDS_OTHERWISE, "4", "4<end><s>user:right<end><s>assistant:"),
        (NEXT_ROLE_ENDS, "4<user>", "4<user>right<s>"),
        (NEXT_ROLE_ENDS, "4", "4<user>right<s>"),
        (TEMPLATE, "4<end>", "4<end><e>\n<s>user\nright<e>\n<s>assistant\n"),  # another end than the template's
    ],
)
def test_turns_are_joined_by_the_templates_own_end(chat_tokenizer, template: str, sampled: str, whole: str) -> None:
    tokenizer = tokenizer_of(chat_tokenizer.backend_tokenizer, template)
    ids = np.array(tokenizer.encode(sampled, add_special_tokens=False))
    added = encode_observation(tokenizer, chat("2+2?"), "right", ids)
    assert tokenizer.decode([*ids.tolist(), *added]) == whole


def test_a_template_that_hides_the_answer_is_refused(chat_tokenizer) -> None:
    tokenizer = tokenizer_of(chat_tokenizer.backend_tokenizer, "{{ messages[-1].content }}")
    with pytest.raises(PromptError, match=r"prompt 'p': .* leaves out what the assistant said"):
        encode_observation(tokenizer, chat("2+2?"), "right", np.array([1]))


def test_a_begun_turn_is_continued(chat_tokenizer) -> None:
    prompt = chat("2+2?", "<think>\nWell")
    ids = encode_prompt(chat_tokenizer, prompt)
    assert chat_tokenizer.decode(ids) == "<s>user\n2+2?<e>\n<s>assistant\n<think>\nWell"
    ids = encode_prompt(chat_tokenizer, prompt, "go")
    assert chat_tokenizer.decode(ids).endswith("2+2?<e>\n<s>user\ngo<e>\n<s>assistant\n<think>\nWell")
    sampled = np.array(chat_tokenizer.encode(" 4<e>", add_special_tokens=False))
    added = encode_observation(chat_tokenizer, prompt, "right", sampled)
    assert chat_tokenizer.decode(added) == "\n<s>user\nright<e>\n<s>assistant\n"


def test_a_begun_thought_is_not_closed_by_the_template() -> None:
    trl = pytest.importorskip("trl")
    from ..builders.tools import make_tokenizer

    for name in ("qwen3", "qwen3_5_think_training", "glm4moe"):
        template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer = make_tokenizer(template)
        text = tokenizer.decode(encode_prompt(tokenizer, chat("2+2?", "<think>\nWell")))
        assert text.endswith("<think>\nWell"), name
        assert text.count("<think>") == 1, name
        assert "</think>" not in text, name


@pytest.mark.parametrize("single", ["<s> $A", "$A <e>", "<s> $A <e>"])
def test_a_text_begins_once_and_does_not_end(chat_tokenizer, single: str) -> None:
    tokenizer = tokenizer_of(chat_tokenizer.backend_tokenizer, TEMPLATE, bos_token="<s>")
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "<e>") if token in single]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, pair="$A $B", special_tokens=ids)
    before = "<s>" if "<s>" in single else ""
    for text, expected in (("hi", before + "hi"), ("<s>user\nhi", "<s>user\nhi")):
        assert tokenizer.decode(encode_prompt(tokenizer, Prompt("t", 0, text=text))) == expected


PARTS = ({"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, "<s>user\n2+2?<e>\n<s>assistant\n"),  # it would write the list as Python does
        ("{% for m in messages %}>{{ m.content if m.content is string else '' }}{% endfor %}", ">2+2?"),
        ("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}", "[2+][2?]"),
    ],
)
def test_parts_of_text_are_shown(chat_tokenizer, template: str, expected: str) -> None:
    tokenizer = tokenizer_of(chat_tokenizer.backend_tokenizer, template)
    assert tokenizer.decode(encode_prompt(tokenizer, Prompt("p", 0, messages=PARTS))) == expected
    image = Prompt("p", 0, messages=({"role": "user", "content": [{"type": "image", "image": "a.png"}]},))
    with pytest.raises(PromptError, match="part of type 'image'"):
        encode_prompt(tokenizer, image)


def test_messages_without_a_template_are_refused(chat_tokenizer) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=chat_tokenizer.backend_tokenizer, eos_token="<e>")
    with pytest.raises(PromptError, match=r"prompt 'p'.*no chat template"):
        encode_prompt(plain, chat("hello"))


def test_an_empty_prompt_is_refused(chat_tokenizer) -> None:
    with pytest.raises(PromptError, match="'e' is empty"):
        encode_prompt(chat_tokenizer, Prompt("e", 0, text=""))


@pytest.mark.parametrize("text", ["emoji 🙂", "עברית", "a<s>b", "\x00\x07", "x" * 5000])
def test_decode_agrees_with_the_tokenizer(chat_tokenizer, text: str) -> None:
    ids = np.array(chat_tokenizer.encode(text, add_special_tokens=False))
    assert decode(chat_tokenizer, [ids, ids[:1]])[0] == chat_tokenizer.decode(ids) == text


def test_special_tokens_are_text_unless_they_begin_end_or_pad_one(chat_tokenizer) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<b>", "pad_token": "<p>"})
    tokenizer.add_tokens([AddedToken("<think>", special=True), AddedToken("<turn>", special=True)], special_tokens=True)
    ids = np.array(tokenizer.encode("<b><think>2<e>3<p><turn>", add_special_tokens=False))
    assert decode(tokenizer, [ids]) == ["<think>23<turn>"]
    texts = TurnTexts(tokenizer)
    assert texts.of([(ids, "eos"), (ids, "stop")]) == ["<think>23", "<think>23<turn>"]
    assert decode_whole(tokenizer, ids) == "<b><think>2<e>3<p><turn>"
    assert texts.of([(ids[:3], "eos")]) == ["<think>2"], "an ordinary token that ends a turn is text"


def test_cut_at_stop_keeps_the_stop_string() -> None:
    assert cut_at_stop("one. two! three", ("!", ".")) == "one."
    assert cut_at_stop("none", ("!",)) == "none"
    assert cut_at_stop("4</answer>\n\n", ("\n", "</answer>")) == "4</answer>"
    assert cut_at_stop("a==b", ("==b", "=")) == "a=", "the first that is complete"
    assert stop_string_of("4.\n", ("\n", ".\n", "!")) == ".\n"
    assert stop_string_of("4", ("\n",)) == ""
