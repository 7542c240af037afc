"""Memory of runs on GPUs that are not here, by model and card, and what TRL needs colocated with vLLM.

    .venv/bin/python benchmarks/bench.py gpu_budget --docs docs/gpu.md

Nothing is measured: Winnow's figures are those of `winnow train recipes/gsm8k-qwen3.yaml --dry-run --gpu` with Qwen3,
all weights or LoRA of rank 16. TRL 1.16 by its defaults: float32 weights under bfloat16 autocast, AdamW, gradient
checkpointing on, vLLM with 0.3 of the card; its activations are counted as Winnow's are, for one row at a time.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import ROOT, write_json
from tables import fill, markdown
from transformers import Qwen3Config

from winnow.base.errors import ConfigError
from winnow.config import RunConfig, load_config
from winnow.engine import LocalOptions
from winnow.engine.loading import build_meta_model
from winnow.run.budget import GIB, USABLE, Budget, Gpus, Shapes
from winnow.run.plan import plan_for

RECIPE = ROOT / "recipes" / "gsm8k-qwen3.yaml"
MODELS = {"0.6B": (1024, 3072, 28, 16), "1.7B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32)}
MODELS |= {"8B": (4096, 12288, 36, 32)}
"""Hidden size, intermediate size, layers, heads of Qwen3."""
CARDS = ("24GiB", "40GiB", "80GiB", "2x24GiB", "2x40GiB", "2x80GiB")
TRAINED = {"full": [], "LoRA": ["lora.r=16"]}
TRL_SHARE = 0.3


def made(directory: str, name: str) -> str:
    """A directory with the model's config.json alone."""
    hidden, intermediate, layers, heads = MODELS[name]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    more = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "architectures": ["Qwen3ForCausalLM"]}
    more |= {"dtype": "bfloat16"}  # as Qwen3 is saved
    path = Path(directory, name)
    Qwen3Config(**sizes, **heads_of, **more, tie_word_embeddings=name != "8B").save_pretrained(path)
    return str(path)


def ours(c: RunConfig, gpus: Gpus) -> str:
    """Largest phase of each GPU, with slots where they are fewer than 256; or the first that does not fit."""
    if gpus.count > 1:
        sync = {"name": "processes", "devices": ["cuda:1"]}
        c = c.model_copy(update={"sync": sync, "rollout_batch": "exact"})
    try:
        found = plan_for(c, gpus)
    except ConfigError as error:
        phase, needed = re.findall(r"the (\w+) phase needs ([\d.]+)", str(error))[0]
        return f"no: {phase} {needed}"
    peaks = [max(sum(held.values()) for held in phases.values()) for phases in found["memory_gib"].values()]
    slots = found["engine"].get("slots") if isinstance(found["engine"], dict) else None
    return " + ".join(f"{peak:.1f}" for peak in peaks) + (f" ({slots})" if slots else "")


def theirs(c: RunConfig, gpus: Gpus) -> str:
    """The update with vLLM awake and asleep."""
    tokens = c.max_prompt_length + c.max_completion_length  # one row, the least
    settled = {"gradient_checkpointing": True, "tokens_per_microbatch": tokens, "dtype": "bfloat16"}
    shapes = replace(Shapes.from_model(build_meta_model(c.model), c.lora), in_bfloat16=False)  # its base is float32
    phases = Budget(c.model_copy(update=settled), shapes, gpus.memory, LocalOptions(), sampler=False).phases()
    asleep = sum(phases["update"].values())
    awake = asleep + TRL_SHARE * gpus.memory
    return " / ".join(f"{held / GIB:.1f}" if held <= USABLE * gpus.memory else "no" for held in (awake, asleep))


def rows_of_models() -> list[dict[str, str]]:
    """A row for each model, what is trained of it, and engine."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in MODELS:
            model = made(directory, name)
            for kind, settings in TRAINED.items():
                trl: dict[str, str] = {}
                for engine in ("local", "vllm"):
                    c = load_config(RECIPE, [f"model={model}", f"engine={engine}", *settings])
                    trl = trl or {f"TRL {card}": theirs(c, Gpus.from_text(card)) for card in CARDS if "x" not in card}
                    row = {"model": f"{name} {kind}", "engine": engine}
                    rows.append(row | {card: ours(c, Gpus.from_text(card)) for card in CARDS} | trl)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", type=Path, help="Markdown file with the marks to write between.")


def run(options: argparse.Namespace) -> None:
    rows = rows_of_models()
    table = markdown(list(rows[0]), [list(row.values()) for row in rows])
    write_json(options.out, {"what": __doc__, "rows": rows})
    if options.docs:
        fill(options.docs, {"gpu-budget": table})
    print(table)
