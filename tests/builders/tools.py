"""Build environments and tokenizers with tools."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.env.base import OverlappingEnv
from winnow.types import Prompt

TEMPLATE = (
    "{% if tools %}<s>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<e>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<s>tool {{ m.name }}\n{{ m.content }}<e>\n"
    "{% else %}<s>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<e>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    """Byte-level, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", additional_special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


class OneTurn:
    """A task of one turn with chat prompts."""

    name, max_turns, stop = "toy", 1, ()

    def __init__(self, *rows, reward_funcs=()):
        self.reward_funcs = list(reward_funcs)
        self.train = [self.prompt(i, row) for i, row in enumerate(rows or [{}])]
        self.test = []

    def prompt(self, i, row):
        return Prompt(f"p{i}", i, messages=({"role": "user", "content": "Count."},), columns=row)

    def make_env(self, prompt):
        return None

    def fingerprint(self):
        return "toy"


def play(task, *texts, prompt=None):
    """First observation and answers."""
    env = task.make_env(prompt or task.train[0])
    assert isinstance(env, OverlappingEnv)
    return env.start_reset().result(10), [env.start_step(text).result(10) for text in texts]
