"""The real pretrained model, where it is in the cache already: `winnow models get smollm2-135m`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow.base.errors import ConfigError
from winnow.engine.base import Finished, Request, SamplingParams
from winnow.engine.loading import load_causal_lm, load_tokenizer
from winnow.engine.local.engine import LocalEngine
from winnow.engine.pretrained import located
from winnow.env.dataset import DatasetConfig
from winnow.env.prompting import encode_observation, encode_prompt

NAME = "smollm2-135m"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    try:
        located(NAME)
    except ConfigError as error:
        pytest.skip(str(error))
    return load_tokenizer(NAME)


def arithmetic(**options: Any) -> Any:
    return DatasetConfig(path="made:arithmetic", **options).build().train[0]


def test_turns_joined_token_by_token_are_what_the_template_writes(tokenizer: Any) -> None:
    prompt = arithmetic()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = [*tokenizer.encode("7 * 8 = 56", add_special_tokens=False), end]
    turns = [*prompt.messages, {"role": "assistant", "content": "7 * 8 = 56"}, {"role": "user", "content": "And 2?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    joined = [
        *encode_prompt(tokenizer, prompt),
        *said,
        *encode_observation(tokenizer, prompt, "And 2?", np.array(said)),
    ]
    assert joined == tokenizer.encode(text, add_special_tokens=False)


def test_a_system_prompt_takes_the_place_of_the_templates_own(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    task = DatasetConfig(path=str(tmp_path / "rows.jsonl"), system_prompt="Be brief.").build()
    text = tokenizer.decode(encode_prompt(tokenizer, task.train[0]))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert "SmolLM" not in text


def test_the_engine_stops_at_the_end_of_a_turn_and_says_the_models_own_log_probabilities(tokenizer: Any) -> None:
    model = load_causal_lm(NAME, torch.device("cpu"))
    engine = LocalEngine(model, tokenizer)
    prompt = encode_prompt(tokenizer, arithmetic())
    engine.submit([Request("a", prompt, SamplingParams(24, temperature=0.0), key=0)])
    events: list[Any] = []
    while engine.pending:
        events += engine.step()
    (found,) = [event for event in events if isinstance(event, Finished)]
    assert found.stop_reason == "eos"
    assert tokenizer.decode(found.token_ids[-1:]) == "<|im_end|>"
    assert " = " in tokenizer.decode(found.token_ids)
    ids = torch.tensor([[*prompt, *found.token_ids.tolist()]])
    with torch.no_grad():
        logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
    np.testing.assert_allclose(found.logp, expected, atol=1e-3)
