"""Benchmarks of speed, memory and cost, by name. Each prints its figures, and `--out` keeps them.

python benchmarks/bench.py                    # lists them
python benchmarks/bench.py step --out benchmarks/results/step.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

BENCHMARKS = {
    "step": "a whole training step against TRL's",
    "engine": "generation against `transformers.generate` and its continuous batching",
    "engine_vllm": "the same against vLLM on the CPU",
    "llm_update": "a step of a pretrained model against TRL's: time and memory",
    "llm_generation": "generation with a pretrained model against `generate` and vLLM",
    "turns": "keys and values kept between the turns of a rollout",
    "sharing": "what siblings begin with, computed once",
    "histories": "rewritten histories of agents",
    "trl_cost": "what a method costs inside TRL",
    "scale_driver": "what a group costs the driver of a cluster",
    "driver_cost": "what a group costs outside the engine, now and before",
    "generation_in_run": "seconds of generation within a run's steps, and of the engine alone",
    "rows": "a data set of many rows, before the first step",
    "million": "a million rollouts through ledger, report and resume",
    "million_prompts": "selecting among a million prompts",
    "gpu_budget": "memory of runs on GPUs that are not here",
}
"""Name -> what it measures. Its module has `run(options)`, and `add_options(parser)` if it has any of its own."""
MODULES = {"engine_vllm": "engine", "turns": "engine", "llm_update": "step", "million_prompts": "rows"}
"""Of those whose module has another name; `options.benchmark` says which was asked for."""


def main() -> None:
    names = sys.argv[1:2]
    if not names or names[0] not in BENCHMARKS:
        print(__doc__)
        print("\n".join(f"  {name:16s}{what}" for name, what in BENCHMARKS.items()))
        sys.exit(0 if not names or names[0] in ("-h", "--help") else 2)
    module = importlib.import_module(MODULES.get(names[0], names[0]))
    parser = argparse.ArgumentParser(
        prog=f"bench.py {names[0]}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(benchmark=names[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    module.run(parser.parse_args(sys.argv[2:]))


if __name__ == "__main__":
    main()
