"""How well a prompt's hidden state tells its pass rate before anything is sampled, in runs that were recorded.

    python benchmarks/prompt_head.py RUN ... --out benchmarks/results/prompt_head.json

In a run's first epoch every prompt is new. A logistic regression on the prompt's last hidden state under the starting
model learns from the groups so far, from recent ones most, and is asked for the next window: which groups are mixed
(AUROC within the window; 0.5 knows nothing), and how many times as many of them are in the half that it likes best.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.config import validate
from winnow.engine.pretrained import located
from winnow.env.prompting import encode_prompt
from winnow.methods.predictions import auroc
from winnow.record.records import LEDGER, read_config
from winnow.run.build import build_task

RIDGE = 30.0
WINDOWS = 12
"""Of an epoch; the regression is fitted before each but the first."""
HALF_LIFE = 3
"""Windows after which a group counts half."""
GROUPS = """SELECT v.prompt_id, o.mean_reward * o.group_size, o.group_size FROM visits v
JOIN outcomes o ON o.visit = v.visit AND o.void = 0
WHERE v.void = 0 AND v.epoch = 0 AND o.mean_reward IS NOT NULL ORDER BY v.visit"""


def features(model: torch.nn.Module, prompts: list[tuple[int, ...]]) -> np.ndarray:
    """Return the prompts' last hidden states, standardised over all, and a constant: float64 [N, hidden + 1]."""
    rows = []
    with torch.no_grad():
        for ids in prompts:
            rows.append(model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1].double().numpy())
    x = np.stack(rows)
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return np.c_[x, np.ones(len(x))]


def fitted(x: np.ndarray, right: np.ndarray, n: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return weights [D] of a ridge logistic regression on x [N, D], by Newton's method.

    `right` [N]: right answers of `n` [N]; `weight` [N]: what a group counts.
    """
    w = np.zeros(x.shape[1])
    for _ in range(12):
        p = chance(x, w)
        hessian = (x * (weight * n * p * (1 - p))[:, None]).T @ x + RIDGE * np.eye(len(w))
        w += np.linalg.solve(hessian, x.T @ (weight * (right - n * p)) - RIDGE * w)
    return w


def chance(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))


def asked(run: Path) -> dict[str, Any]:
    config = validate(read_config(run), str(run))
    with sqlite3.connect(run / LEDGER) as db:
        ids, right, n = map(np.array, zip(*db.execute(GROUPS), strict=True))
    prompts = {p.id: p for p in build_task(config.env).train}
    tokenizer = AutoTokenizer.from_pretrained(located(config.model))
    model = AutoModelForCausalLM.from_pretrained(located(config.model)).eval()
    x = features(model, [encode_prompt(tokenizer, p) for p in prompts.values()])
    x = x[[list(prompts).index(i) for i in ids.tolist()]]
    mixed, size = (right > 0) & (right < n), -(-len(ids) // WINDOWS)
    found = []
    for start in range(size, len(ids), size):
        weight = 0.5 ** ((start - np.arange(start)) / (HALF_LIFE * size))
        w = fitted(x[:start], right[:start], n[:start], weight)
        new = slice(start, start + size)
        p, hit = chance(x[new], w), mixed[new]
        liked = np.argsort(-p * (1 - p))[: len(p) // 2]
        found.append((auroc(p * (1 - p), hit, np.ones(len(p))), hit[liked].mean() / hit.mean()))
    auc, more = np.mean(found, 0)
    figures = {"mixed": mixed.mean(), "auroc_mixed": auc, "mixed_in_the_liked_half": more}
    return {"groups": len(ids)} | {name: round(float(figure), 3) for name, figure in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    said = {}
    for run in options.runs:
        said[run.name] = asked(run)
        print(run.name, json.dumps(said[run.name]), flush=True)
    if options.out:
        write_json(options.out, {"machine": machine("cpu"), "runs": said})


if __name__ == "__main__":
    main()
