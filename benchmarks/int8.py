"""Would int8 weights pay in decoding? Time of the layers' products, and how far log-probabilities move.

    OMP_NUM_THREADS=1 python benchmarks/int8.py --model DIRECTORY --out benchmarks/results/int8.json

`DIRECTORY`: SmolLM2-135M-Instruct. Weights are rounded for each output, inputs for each row (so that results do not
depend on what else is in the batch), symmetrically; products are PyTorch's int8 ones, scaled afterwards. Beside it,
PyTorch's product of inputs in bfloat16 with int8 weights. Log-probabilities are those of sampled answers, float32
against rounded, in nats; above 0.1 in the mean a run is refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llm_sides import load
from machine import machine
from step import _spread
from transformers import AutoTokenizer

QUESTIONS = ("What is 7 + 5?", "What is 12 times 3?", "Name a city in France.", "Write a short poem on rain.")
ROWS = (8, 32, 64, 256)
REPEATS = 5


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and the scale of each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
    return (x / scale).round_().to(torch.int8), scale


def products(weights: list[torch.Tensor], rows: int) -> dict[str, Any]:
    """Milliseconds of a pass over the weights of all layers, from an input of `rows` rows each, and the ratios."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in weights}
    packed = [(torch.ops.mkldnn._reorder_linear_weight(w, rows), w.shape[1]) for w in weights]
    small = [(*rounded(w), w.shape[1]) for w in weights]

    def float32() -> None:
        for w, n in packed:
            torch.ops.mkldnn._linear_pointwise(inputs[n], w, None, "none", [], "")

    def int8() -> None:
        for w, scale, n in small:
            x, of_row = rounded(inputs[n])
            torch._int_mm(x, w.t()).float().mul_(of_row).mul_(scale.t())

    def weights_alone() -> None:
        for w, scale, n in small:
            torch._weight_int8pack_mm(inputs[n].bfloat16(), w, scale[:, 0].bfloat16())

    taken = [[_milliseconds(run) for run in (float32, int8, weights_alone)] for _ in range(REPEATS + 1)][1:]
    return {
        "rows": rows,
        "float32_ms": statistics.median(t[0] for t in taken),
        "int8_times_faster": _spread([t[0] / t[1] for t in taken]),
        "int8_weights_alone_times_faster": _spread([t[0] / t[2] for t in taken]),
    }


def _milliseconds(run: Callable[[], None]) -> float:
    started = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - started)


@contextmanager
def rounding(model: torch.nn.Module, *, inputs: bool, leave: tuple[str, ...]) -> Iterator[None]:
    """All linear layers but those named."""
    kept, hooks = {}, []
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not any(part in name for part in leave):
            kept[layer] = layer.weight.data
            layer.weight.data = torch.mul(*rounded(layer.weight.data))
            if inputs:
                hooks.append(layer.register_forward_pre_hook(lambda _, args: (torch.mul(*rounded(args[0])),)))
    try:
        yield
    finally:
        for layer, weight in kept.items():
            layer.weight.data = weight
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def distances(model: Any, tokenizer: Any) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    sampled = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompt = ids["input_ids"]
        options = {"max_new_tokens": 48, "do_sample": True, "top_k": 0, "num_return_sequences": 4}
        sampled.append((prompt.shape[1], model.generate(prompt, **options)))

    def logp() -> torch.Tensor:
        found = []
        for start, ids in sampled:
            every = model(ids).logits.log_softmax(-1)[:, start - 1 : -1]
            found.append(every.gather(-1, ids[:, start:, None]).flatten())
        return torch.cat(found)

    exact, found = logp(), {}
    ways: dict[str, tuple[bool, tuple[str, ...]]] = {
        "weights": (False, ()),
        "weights but the head": (False, ("lm_head",)),
        "weights and inputs": (True, ()),
        "weights and inputs but the head": (True, ("lm_head",)),
        "weights and inputs of q, k, v, gate and up alone": (True, ("lm_head", "o_proj", "down_proj")),
    }
    for name, (inputs, leave) in ways.items():
        with rounding(model, inputs=inputs, leave=leave):
            apart = (logp() - exact).abs()
        found[name] = {"mean": float(apart.mean()), "median": float(apart.median()), "max": float(apart.max())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = load(options.model, "float32")
    weights = [
        layer.weight.detach()
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    ]
    said = {
        "machine": machine("cpu"),
        "threads": torch.get_num_threads(),
        "products": [products(weights, rows) for rows in ROWS],
        "logp_apart": distances(model, AutoTokenizer.from_pretrained(options.model)),
    }
    options.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
