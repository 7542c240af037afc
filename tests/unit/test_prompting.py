from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.env.prompting import PromptError, cut_at_stop, decode, encode_observation, encode_prompt
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", additional_special_tokens=["<s>"])
    tokenizer.chat_template = TEMPLATE
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
    assert decode(chat_tokenizer, [ids, ids[:1]])[0] == chat_tokenizer.decode(ids, skip_special_tokens=True)


def test_cut_at_stop() -> None:
    assert cut_at_stop("one. two! three", ("!", ".")) == "one"
    assert cut_at_stop("none", ("!",)) == "none"
