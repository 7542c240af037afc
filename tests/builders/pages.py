"""Build runs on disk, and their pages in a browser."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from winnow.record.ledger import Ledger
from winnow.study.report import write_report
from winnow.types import Fate, Group, Prompt, Rollout, Visit

HOSTILE = "</script><script>alert(1)</script><!-- \"'` & \x00\x1b[31m\x85 \u202egnirts\u202c \u2028 \ud800 نص عربي 🙂"


def metrics_row(step: int, steps: int, draw: random.Random) -> dict[str, float]:
    done = step / steps
    hard, easy = 0.33 * (1 - done) + 0.02 * draw.random(), 0.33 * done + 0.02 * draw.random()
    tokens = {
        "trained": 256 * 15 * (1 - hard - easy),
        "filtered": 256 * 15 * (hard + easy),
        "failed": 30.0 * (draw.random() < 0.1),
    }
    seconds = {"generate": 0.22 + 0.04 * draw.random(), "reward": 0.004, "update": 0.16, "publish": 0.01, "idle": 0.003}
    row = {
        "step": step,
        "reward": 0.16 + 0.38 * (1 - math.exp(-3 * done)) + draw.gauss(0, 0.03),
        "reward_std": 0.3 - 0.1 * done + draw.gauss(0, 0.01),
        "frac_reward_zero_std": hard + easy,
        "frac_zero_easy": easy,
        "frac_zero_hard": hard,
        "rewards/correct/mean": 0.2 + 0.3 * done,
        "rewards/format/mean": 0.8 + 0.1 * done,
        "kl": 0.02 * done * (1 + 0.2 * draw.random()),
        "entropy": 1.2 * math.exp(-done) + draw.gauss(0, 0.02),
        "clip_ratio/low_mean": 0.01 * draw.random(),
        "clip_ratio/high_mean": 0.02 * draw.random(),
        "clip_ratio/region_mean": 0.03 * draw.random(),
        "completions/mean_length": 14 + draw.random(),
        "completions/max_length": 18 + draw.randrange(4),
        "completions/clipped_ratio": 0.02 * draw.random(),
        "sampling/importance_sampling_ratio/mean": 1 + draw.gauss(0, 0.004),
        "num_tokens": step * 256 * 15,
        "step_time": sum(seconds.values()),
        "learning_rate": 1e-4 * min(1, step / 10),
        "effective_learning_rate": 1e-4 * min(1, step / 10) / (1 - hard - easy),
        "grad_norm": 0.5 + 0.2 * draw.random() + (3 if draw.random() < 0.01 else 0),
        "loss": draw.gauss(0, 0.02),
        "groups/effective": 32 * (1 - hard - easy),
        "groups/size_mean": 8.0,
        "tokens_per_second": 9000 + draw.gauss(0, 400),
        "seconds_total": step * 0.44,
        "memory/rss_mb": 900 + step / 10,
    }
    row |= {f"tokens/{k}": v for k, v in tokens.items()} | {f"seconds/{k}": v for k, v in seconds.items()}
    if step % 20 == 0:
        row |= {"eval/pass@1": 0.16 + 0.3 * done, "eval/pass@8": 0.5 + 0.25 * done, "eval/greedy": 0.18 + 0.4 * done}
        row["eval/mean_length"] = 14.0
    return row


def decision(char: int, keep: bool, **changes: Any) -> dict[str, Any]:
    base = {"gate": "arrol", "turn": 0, "token": 3, "char": char, "keep": keep, "reason": "", "overridden": None}
    return base | changes


def sample(step: int, fate: str, reward: float | None, **changes: Any) -> dict[str, Any]:
    base = {"step": step, "visit": 32 * step, "prompt_id": f"countdown-{step}", "epoch": 0, "sibling": step % 8}
    base |= {"prompt": "Use 3, 5 and 2 to make 16.", "completion": "3 + 5 = 8 , 8 * 2 = 16", "reward": reward}
    base |= {"rewards": {"correct": reward, "format": 1.0}, "fate": fate, "reason": "", "stop_reason": "eos"}
    base["group_rewards"] = [reward, 0.0, None]
    base["turns"] = [{"at": 0, "chars": [1, *[2] * 9, 3, 0], "logp": [-0.01 * 3**n for n in range(7)] + [-0.2] * 5}]
    base["decisions"] = [decision(9, True, evidence={"score": 0.5, "q": 0.625})]
    pruned = decision(5, False, reason="pruned at token 3: predicted success 0.10, survival 0.20")
    base["siblings"] = [
        {"reward": 0.0, "fate": "trained", "completion": "3 + 5", "decisions": [pruned]},
        {"reward": None, "fate": "failed"},
    ]
    return base | {"tokens": 12, "split": "train"} | changes


def write_ledger(path: Path, steps: int) -> None:
    with Ledger.open(path) as ledger:
        ledger.set_meta("max_lag", "0")
        for step in range(1, steps + 1):
            visits = [Visit(2 * (step - 1) + i, 0, Prompt(f"p{i}", i, "x")) for i in range(2)]
            ledger.visit(visits, step=step, version=step - 1)
            for visit, fate in zip(visits, (Fate.TRAINED, Fate.FILTERED), strict=True):
                rollouts = [rollout(i, step - 1, reward=float(fate == Fate.TRAINED and i), fate=fate) for i in range(2)]
                ledger.finish(Group(visit, rollouts), step=step)
            ledger.step(step, seconds={"generate": 0.2}, metrics={"reward": 0.5}, version=step - 1)
        ledger.evaluation(0, rollouts=16, tokens=160, seconds=0.1)
        ledger.set_meta("finished", "true")


def rollout(sibling: int, version: int, *, reward: float | None, fate: Fate, tokens: int = 1000) -> Rollout:
    mask = np.ones(tokens, bool)
    versions = np.full(tokens, version, np.int32)
    ids, logp = np.zeros(tokens, np.int64), np.zeros(tokens, np.float32)
    return Rollout(sibling, (1, 2), ids, mask, logp, versions, reward=reward, fate=fate, seconds=0.01)


def make_run(path: Path, *, steps: int = 60, seed: int = 0, samples: list[dict[str, Any]] | None = None) -> Path:
    path.mkdir(parents=True)
    draw = random.Random(seed)
    rows = [metrics_row(step, steps, draw) for step in range(steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"seed": seed, "learning_rate": 1e-4, "env": {"name": "countdown", "numbers": 3}, "advantage": "grpo"}
    (path / "config.json").write_text(json.dumps(config))
    kinds = [("trained", 1.0), ("trained", 0.0), ("filtered", 1.0), ("failed", None)]
    if samples is None:
        samples = [sample(step, *kinds[step % 4]) for step in range(steps)]
    (path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    write_ledger(path / "ledger.sqlite", min(steps, 20))
    return path


class Page(HTMLParser):
    """The tags of a page and the JSON it carries, as an HTML parser sees them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text("utf-8")
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._in_data = False
        self._data = ""
        self.feed(self.text)
        self.data = json.loads(self._data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._in_data = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self._data += data


def page(*runs: Path) -> Page:
    output = runs[0].parent / "page.html"
    write_report(runs, output)
    return Page(output)


def card(found: Page, label: str) -> dict[str, str]:
    return next(c for c in found.data["cards"][0] if c["label"] == label)
