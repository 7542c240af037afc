"""Plan of a run and its budget of tokens and memory, as `winnow train --dry-run` prints it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import ConfigError
from ..base.machine import GIB, MIB
from ..config import RunConfig
from ..config.options import name_of, new_groups
from ..engine import VllmOptions
from ..engine.initial_model import InitialModel
from ..learner.fsdp.learner import FsdpLearner
from ..tasks.prompt_example import prompt_example
from .budget import Budget, Gpus, Phases, engine_bytes, host_budget
from .preflight import placement
from .resolve import resolve
from .resolved import Machine, Options, Resolved

if TYPE_CHECKING:
    from .trainer import Trainer


REFILLS = "the filter replaces the groups that it drops, so a step may sample several times as much"


def plan(trainer: Trainer) -> dict[str, Any]:
    """Return the plan. Figures are upper bounds but for refills; completions usually end earlier."""
    c, parameters, trained = trainer.config, trainer.learner.sizes.total, trainer.learner.sizes.trained
    rollouts = rollouts_per_step(trainer)
    example = prompt_example(trainer.task, trainer.tokenizer)
    evaluations = -(-c.max_steps // c.eval_steps) + 1 if c.eval_steps else 0  # also before the first and after the last
    sent = not (isinstance(trainer.learner, FsdpLearner) and trainer.learner.read)
    r, why, warnings = trainer.resolved, trainer.resolved.why, trainer.resolved.warnings
    return {
        "model": c.model,
        **({"model_because": why["model"]} if why.get("model") else {}),
        "parameters": parameters,
        "trained_parameters": trained,
        "device": str(trainer.learner.device),
        "train_prompts": len(trainer.task.train),
        "test_prompts": len(trainer.task.test),
        "prompt_example": example.text if example else None,
        "prompt_tokens": example.tokens if example else None,
        **({"prompt_followed_by": example.follows} if example and example.follows else {}),
        "steps": c.max_steps,
        "rollouts_per_step": rollouts,
        "max_sampled_tokens_per_step": rollouts * c.max_completion_length,
        "max_sampled_tokens": rollouts * c.max_completion_length * c.max_steps,
        **({"refills": REFILLS} if trainer.methods.filter.refill else {}),
        "epochs": round(c.max_steps * new_groups(c.prompts_per_step, c.reuse) / len(trainer.task.train), 2),
        "evaluations": evaluations,
        "right": str(trainer.methods.judge.success),
        "weights_mib": round(4 * parameters / MIB, 1),
        "published_mib": round(sum(spec.bytes for spec in trainer.learner.weights().specs.values()) / MIB, 1),
        "engine_weights_mib": round(engine_bytes(r.engine) * parameters / MIB, 1),
        "tokens_per_microbatch": c.tokens_per_microbatch,
        "gradient_checkpointing": c.gradient_checkpointing,
        "save_dtype": c.save_dtype,
        "dtype": c.dtype,
        "dtype_because": why["dtype"],
        "threads": torch.get_num_threads(),
        "threads_because": why["threads"],
        "engine": c.engine,
        **({"engine_because": why["engine"]} if why.get("engine") else {}),
        "output_dir": c.output_dir,
        **_memory_of(trainer),
        **({"warnings": list(warnings)} if warnings else {}),
        **placement(r, trainer.learner.sizes, rollouts, sent=sent),
    }


def _memory_of(trainer: Trainer) -> dict[str, Any]:
    """Return the GiB of each phase on the run's GPU; empty on a CPU."""
    if not trainer.resolved.budgets:
        return {}
    budget = next(iter(trainer.resolved.budgets.values()))
    return {"memory_gib": _in_gib(budget.phases()), "host_memory_gib": _in_gib(_on_host(trainer.resolved))}


def _in_gib(phases: Phases) -> dict[str, dict[str, float]]:
    return {phase: {part: round(bytes_ / GIB, 2) for part, bytes_ in held.items()} for phase, held in phases.items()}


def plan_for(c: RunConfig, gpus: Gpus) -> dict[str, Any]:
    """Return the plan of a run on other GPUs: what `auto` becomes, the memory of each phase in GiB, and seconds a step.

    Reads only the model's configuration. The learner has the first GPU, and samplers those that `sync` gives them.
    Raises ConfigError when the run cannot fit, or would leave a GPU idle, with the keys to change.
    """
    options, machine, model = Options.from_config(c), Machine.with_gpus(gpus), InitialModel.from_config(c).read(c)
    if gpus.count > 1 and not options.samples_elsewhere and options.ranks == 1:
        raise ConfigError(
            f"--gpu: {gpus.count} GPUs, but sync: {name_of(c.sync)} samples on the learner's; plan for one, or set "
            "max_lag: 1 and sync: {name: processes, devices: [cuda:1]}"
        )
    r = resolve(c, options, machine, model)
    c, budgets = r.config, r.budgets
    shapes = next(iter(budgets.values())).shapes
    planned: dict[str, Any] = {"model": c.model, "parameters": shapes.parameters, "trained_parameters": shapes.trained}
    for key in ("dtype", "tokens_per_microbatch", "gradient_checkpointing", "engine"):
        planned[key] = getattr(c, key)
    planned |= {"engine_because": r.why.get("engine", "as configured"), "gpus": gpus.count}
    planned["gib_of_each"] = round(gpus.memory / GIB, 1)
    planned["memory_gib"] = {name: _in_gib(budget.phases()) for name, budget in budgets.items()}
    planned["seconds_per_step"] = seconds_per_step(c, next(iter(budgets.values())))
    if not r.options.learns_elsewhere:
        planned["host_memory_gib"] = _in_gib(_on_host(r))
    return planned


LAYER_S, BYTES_PER_S = 5.97e-3 / 28, 2.7e12
"""Of a decode step on an H100 80GB, Qwen3-0.6B's shapes, 256 rows: seconds a layer, which launches take, and bytes read
a second, where those take longer (0.8 of the card's; not measured)."""
LAUNCHES_S, TOKEN_S, PARAMETERS = 0.13 / 28, 1 / 37_500, 596e6
"""Of an update there: seconds a layer, seconds a token, and the parameters that took them."""
H100_GIB = (70, 100)
"""Memory of cards that are taken for an H100."""


def seconds_per_step(c: RunConfig, budget: Budget) -> dict[str, Any]:
    """Return the seconds of a step with rollouts of maximum length, by phase, from what an H100 took, and how sure
    they are. What siblings share saves time on top of that.

    A decode step takes a layer's launches, or reads weights and cache, whichever is longer; an update launches, and
    computes in proportion to tokens and parameters.
    """
    shapes, rollouts = budget.shapes, c.prompts_per_step * c.num_generations
    slots = min(getattr(budget.engine, "slots", rollouts), rollouts)
    each = engine_bytes(budget.engine)
    read = each * (shapes.parameters + slots * (c.longest - c.max_completion_length // 2) * shapes.kv_elements)
    step_s = max(LAYER_S * shapes.layers, read / BYTES_PER_S)
    token_s = TOKEN_S * shapes.parameters / PARAMETERS * (4 / 3 if c.gradient_checkpointing is True else 1)
    decode = c.max_completion_length * -(-rollouts // slots) * step_s
    update = LAUNCHES_S * shapes.layers + rollouts * c.longest * token_s / budget.ranks
    sure = "measured on an H100 80GB with 0.6 billion parameters, embedded engine, bfloat16"
    if not H100_GIB[0] <= budget.memory / GIB <= H100_GIB[1]:
        sure += "; this card is another one, and a smaller one is several times slower"
    elif abs(math.log(shapes.parameters / PARAMETERS)) > math.log(1.5):
        sure += "; scaled by layers, bytes and parameters, so right within a factor of 2 or so"
    if isinstance(budget.engine, VllmOptions):
        sure += "; vLLM has not been measured on a GPU"
    return {"generation": round(decode, 1), "update": round(update, 1), "because": sure}


def _on_host(r: Resolved) -> Phases:
    shapes = next(iter(r.budgets.values())).shapes
    return host_budget(r.config, shapes, r.engine, behind=r.behind)


def rollouts_per_step(trainer: Trainer) -> int:
    """Return the rollouts of a step with the largest groups; a filter that refills may need more."""
    m = trainer.methods
    return trainer.config.prompts_per_step * (m.group_size.largest + m.advantage.greedy_baseline)
