"""An agent that compacts its history when its context is nearly full, trained on what cannot be solved in one context.

    python examples/compacting_agent.py

The policy is given a key and has to say it in every answer, behind more words than its context holds. The agent lets it
write a note and goes on with the note alone, so the policy has to learn what to write down, and to read it. The model
has two layers and starts with random weights; two to three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from winnow import Trainer
from winnow.env.dataset import DatasetConfig
from winnow.tasks.agents import with_agent

KEYS = ("red", "blue", "green", "black")
WORDS = ["<eos>", "<unk>", "<user>", "<bot>", *KEYS, "la", "key", "note", "is", "?", "ask"]
FILLER = "la la la la la la la la"
QUESTIONS = (FILLER, FILLER, FILLER, "key ?")
CONTEXT = 40
"""Tokens of a segment."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} "
    "{% else %}<bot> {{ m.content }} <eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
SETTINGS: dict[str, Any] = {
    "prompts_per_step": 4,
    "num_generations": 16,
    "max_prompt_length": 12,
    "max_completion_length": 120,
    "context_length": CONTEXT,
    "learning_rate": 3e-3,
    "entropy_coef": 0.01,
    "advantage": "rloo",
    "max_skipped_steps": 1000,
    "threads": 1,
}


def make_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a chat model with random weights, and the rows of its task."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = template
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    rows = [json.dumps({"prompt": f"key is {key}", "answer": key}) for key in KEYS]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


def ask(base_url: str, messages: list[dict[str, str]], model: str = "policy") -> tuple[str, int]:
    """Return the answer, and the tokens of the context with it. Any client of OpenAI's API can be used instead."""
    body = json.dumps({"model": model, "messages": messages}).encode()
    with urllib.request.urlopen(f"{base_url}/chat/completions", body, timeout=60) as reply:
        found = json.load(reply)
    return found["choices"][0]["message"]["content"], found["usage"]["total_tokens"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def compacting(prompt: str, answer: str, base_url: str) -> float:
    """Go on with a note when the next question would not fit; return the share of right answers, the note included."""
    messages = [user(prompt)]
    said, used = ask(base_url, messages)
    answers = [said]
    for question in QUESTIONS:
        messages.append({"role": "assistant", "content": said})
        if used + 14 > CONTEXT:
            note, _ = ask(base_url, [*messages, user("note ?")])
            answers.append(note)
            messages = [user(note)]
        messages.append(user(question))
        said, used = ask(base_url, messages)
        answers.append(said)
    return answers.count(answer) / len(answers)


def whole(prompt: str, answer: str, base_url: str) -> float:
    """The same questions with the whole history."""
    messages = [user(prompt)]
    said, _ = ask(base_url, messages)
    answers = [said]
    for question in QUESTIONS:
        messages += [{"role": "assistant", "content": said}, user(question)]
        said, _ = ask(base_url, messages)
        answers.append(said)
    return answers.count(answer) / len(answers)


def play(base_url: str) -> dict[str, float]:
    """Two agents: one names a key, the other has to answer with the next one. The first wins if the second fails."""
    question, _ = ask(base_url, [user("ask ?")], model="policy/proposer")
    if question not in KEYS:
        return {"proposer": 0.0}
    answer, _ = ask(base_url, [user(question)], model="policy/solver")
    right = answer == KEYS[(KEYS.index(question) + 1) % len(KEYS)]
    return {"proposer": 1.0 - 0.5 * right, "solver": float(right)}


def train(model: Path, agent: Any, run: Path, *, turn_length: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Train the model with an agent; return the metrics of all steps."""
    task = with_agent(DatasetConfig(str(model / "rows.jsonl")).build(), agent, max_turn_length=turn_length)
    Trainer(model=str(model), env=task, config=SETTINGS | {"output_dir": str(run)} | more).train()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/compacting"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = train(make_model(Path(folder)), compacting, arguments.output, max_steps=arguments.steps)
    print(f"right at first {rows[0]['reward']:.2f}, at the end {rows[-1]['reward']:.2f}")


if __name__ == "__main__":
    main()
