"""An agent whose history changes, and a run that trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AGENT = '''
"""Asks twice, with its history or a compacted one; the reward varies within almost every group."""

import json
import re
import sqlite3
import urllib.request


def ask(base_url, messages):
    body = json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(f"{base_url}/chat/completions", body, timeout=60) as reply:
        choice = json.load(reply)["choices"][0]
    return choice["message"], choice["finish_reason"]


def solve(prompt, base_url):
    messages = [{"role": "user", "content": prompt}]
    first, why = ask(base_url, messages)
    assert why in ("stop", "length")
    if len(first["content"]) % 2:
        messages = [{"role": "user", "content": "It was: " + first["content"]}]
    else:
        messages.append(first)
    second, _ = ask(base_url, [*messages, {"role": "user", "content": "Sure?"}])
    return len(first["content"] + second["content"]) % 2
'''


SHARING = (
    AGENT.replace("def solve(", "def alone(")
    + """

import threading

places = threading.Semaphore(2)


def solve(prompt, base_url):
    with places:
        return alone(prompt, base_url)
"""
)


def agent_config(model: Path, folder: Path, agent: str = AGENT) -> dict[str, Any]:
    (folder / "agent.py").write_text(agent)
    rows = [json.dumps({"prompt": f"What is {n} and {n}?"}) for n in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    env = {"name": "agent", "path": str(folder / "rows.jsonl"), "agent": f"{folder}/agent.py:solve", "test_size": 3}
    return {
        "model": str(model),
        "env": env | {"max_turns": 3, "max_turn_length": 8},
        "output_dir": str(folder / "run"),
        "threads": 1,
        "max_steps": 4,
        "prompts_per_step": 3,
        "num_generations": 4,
        "max_prompt_length": 128,
        "max_completion_length": 96,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "eval_steps": 2,
    }
