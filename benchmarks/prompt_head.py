"""How well a prompt's hidden state tells its pass rate before anything is sampled.

    winnow pass-rates MODEL --config recipes/countdown-greso.yaml n=16 -o rates.jsonl
    python benchmarks/prompt_head.py MODEL rates.jsonl --config recipes/countdown-greso.yaml --out FILE

A logistic regression on the last hidden state of the prompt learns from the first groups and is asked for the others:
whether theirs are mixed (AUROC; 0.5 knows nothing), and how much more signal the half that it likes best has.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from harness import machine, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.config import load_config
from winnow.engine.pretrained import located
from winnow.env.prompting import encode_prompt
from winnow.methods.gate.arrol.stats import auroc
from winnow.run.build import build_task

TRAINED_ON = (64, 256, 1024, 2048)
"""Groups."""
RIDGE = 10.0


def features(model: torch.nn.Module, prompts: list[tuple[int, ...]]) -> np.ndarray:
    """Return the prompts' last hidden states, standardised over all, and a constant: float64 [N, hidden + 1]."""
    rows = []
    with torch.no_grad():
        for ids in prompts:
            rows.append(model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1].double().numpy())
    x = np.stack(rows)
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return np.c_[x, np.ones(len(x))]


def fitted(x: np.ndarray, right: np.ndarray, n: int) -> np.ndarray:
    """Return weights [D] of a ridge logistic regression on x [N, D], by Newton's method.

    `right` [N]: right answers of `n`.
    """
    w = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x * (n * p * (1 - p))[:, None]).T @ x + RIDGE * np.eye(len(w))
        w += np.linalg.solve(hessian, x.T @ (right - n * p) - RIDGE * w)
    return w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rates", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="key=value of the configuration")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rates = {row["id"]: row for row in map(json.loads, options.rates.read_text(encoding="utf-8").splitlines())}
    config = load_config(options.config, [f"model={options.model}", *options.set])
    prompts = [p for p in build_task(config.env).train if p.id in rates]
    tokenizer = AutoTokenizer.from_pretrained(located(options.model))
    model = AutoModelForCausalLM.from_pretrained(located(options.model)).eval()
    x, n = features(model, [encode_prompt(tokenizer, p) for p in prompts]), next(iter(rates.values()))["n"]
    right = np.array([rates[p.id]["correct"] for p in prompts])
    order = np.random.default_rng(0).permutation(len(x))
    test = order[len(x) // 2 :]
    rate, mixed = right[test] / n, (right[test] > 0) & (right[test] < n)
    found = []
    for many in (m for m in TRAINED_ON if m <= len(x) // 2):
        p = 1 / (1 + np.exp(-x[test] @ fitted(x[order[:many]], right[order[:many]], n)))
        liked = np.argsort(-p * (1 - p))[: len(test) // 2]
        signal = rate * (1 - rate)
        found.append(
            {
                "groups": many,
                "auroc_mixed": round(auroc(p * (1 - p), mixed, np.ones(len(p))), 3),
                "correlation_of_rates": round(float(np.corrcoef(p, rate)[0, 1]), 3),
                "signal_of_the_liked_half": round(float(signal[liked].mean() / signal.mean()), 3),
            }
        )
        print(found[-1])
    if options.out:
        said = {"machine": machine("cpu"), "prompts": len(prompts), "rollouts": n, "mixed": float(mixed.mean())}
        old = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        write_json(options.out, old | {Path(options.config).stem: said | {"trained_on": found}})


if __name__ == "__main__":
    main()
