"""GPU memory of a run by phase, from its config and its model's shapes alone.

`Budget` has the memory of each phase, and chooses `auto` values by it: slots of the embedded engine, tokens per
micro-batch, gradient checkpointing. `--dry-run --gpu 24GiB` prints it for any GPU.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.errors import ConfigError
from ..base.machine import GIB
from ..config import RunConfig
from ..config.options import LoraConfig
from ..engine import LocalOptions, VllmOptions
from ..engine.local.backend import PREFILL_TOKENS
from ..engine.vllm.options import PREFILL_TOKENS as VLLM_TOKENS
from ..learner.batch import LANE_WIDTHS
from ..learner.local.learner import FILE_BYTES
from ..learner.local.logprob import SLICE_ELEMENTS
from ..learner.local.recompute import WORTH, is_gated

USABLE = 0.94
"""Share of GPU memory for tensors; the rest is for CUDA's context, kernels and fragments."""
HALF = ("bfloat16", "float16")
AT_MOST = 16_384
"""Most tokens of a micro-batch: more are no faster."""
AT_LEAST = 256
"""Fewest tokens: with fewer, a pass over the weights takes as long as the products."""
MOST_OF_VLLM = 0.95
"""Largest `gpu_memory_utilization` that is chosen; vLLM refuses more than is free on the GPU."""
ASLEEP = GIB
"""GPU memory that a sleeping vLLM keeps: CUDA graphs and workspaces; an estimate."""
OPTIMIZER = {"adamw_torch_8bit": 2, "adamw_torch_4bit": 1, "sgd": 4, "muon": 4, "adafactor": 0}
"""Bytes of optimizer state per trained parameter; AdamW has 8."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of a causal LM, for memory estimates."""

    parameters: int
    trained: int
    vocabulary: int
    """Parameters of the input embedding."""
    head: int
    """Parameters of the head; 0: it is the input embedding."""
    vocab_size: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    """Width of the queries of all heads."""
    keys: int
    """Width of the keys (and of the values) of all heads."""
    qk_norm: bool
    """Whether queries and keys are normalized."""
    recomputes: bool
    """Whether the backward pass recomputes norms and gated activations."""
    in_bfloat16: bool = False
    """Whether the given weights are bfloat16."""

    @property
    def kv_elements(self) -> int:
        """Return the elements of keys and values of one position, over all layers."""
        return 2 * self.layers * self.keys

    @property
    def matrices(self) -> int:
        """Return the number of parameters outside the input embedding."""
        return self.parameters - self.vocabulary

    def kept_by_layer(self, half: bool, *, recomputed: bool, lora: bool) -> int:
        """Return the bytes per token that one decoder layer keeps for the backward pass (`learner/local/recompute.py`).

        As counted on Llama and Qwen3: the residual stream in float32; queries, keys (before and after their norms) and
        values; attention's output; gate and up; under autocast also the cast inputs of the matrices.
        """
        each, H, I, rotated = 2 if half else 4, self.hidden, self.intermediate, self.queries + self.keys  # noqa: E741
        kept = 4 * 2 * H + each * ((1 + self.qk_norm) * rotated + self.keys + self.queries + 2 * I) + 4 * self.heads
        if half:
            kept += 2 * (2 * H + I)
        if not recomputed:
            normed = self.qk_norm * rotated
            kept += 8 * H + 2 * I + 6 * normed if half else 4 * (4 * H + 2 * I + normed)
        if lora and half:
            kept += 2 * (3 * H + self.queries + I)
        return kept

    @classmethod
    def from_model(cls, model: Any, lora: LoraConfig | None) -> Shapes:
        """Return the sizes of a model, which may be on the meta device."""
        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1  # a recurrent model, which the engine refuses, has none
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        total = sum(p.numel() for p in model.parameters())
        embedding = model.get_input_embeddings().weight
        head = getattr(model.get_output_embeddings(), "weight", embedding)
        return cls(
            parameters=total,
            trained=total if lora is None else _adapter_parameters(model, lora),
            vocabulary=embedding.numel(),
            head=0 if head is embedding else head.numel(),
            vocab_size=embedding.shape[0],
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            queries=heads * width,
            keys=(getattr(text, "num_key_value_heads", None) or heads) * width,
            qk_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
            recomputes=total >= WORTH and any(is_gated(module) for module in model.modules()),
            in_bfloat16=(model.config.dtype if embedding.is_meta else embedding.dtype) == torch.bfloat16,
        )


def _adapter_parameters(model: Any, lora: LoraConfig) -> int:
    head, targets = model.get_output_embeddings(), lora.target_modules
    names = [targets] if isinstance(targets, str) else targets or ["all-linear"]
    parameters = 0
    for name, module in model.named_modules():
        adapted = names == ["all-linear"] or name.rpartition(".")[2] in names
        if adapted and module is not head and hasattr(module, "in_features"):
            parameters += lora.r * (module.in_features + module.out_features)
    return parameters


@dataclass(frozen=True)
class Gpus:
    """GPUs of equal size: the learner has the first; with a second, samplers have the others."""

    count: int
    memory: int
    """Bytes per GPU."""

    @classmethod
    def from_text(cls, text: str) -> Gpus:
        """Parse `24GiB`, `80GB` or `2x80GiB`. Raises ConfigError on anything else."""
        match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)\s*(GiB|GB)", text.strip(), re.IGNORECASE)
        if match is None or int(match[1] or 1) < 1:
            raise ConfigError(f"--gpu: cannot read {text!r}; write e.g. 24GiB or 2x80GiB")
        return cls(int(match[1] or 1), int(float(match[2]) * (GIB if match[3].lower() == "gib" else 10**9)))


Phases = dict[str, dict[str, int]]
"""Phase -> part -> bytes."""


@dataclass(frozen=True)
class Budget:
    """Memory of a run on one GPU, which learner, sampler or both use."""

    config: RunConfig
    shapes: Shapes
    memory: int
    """Bytes of the GPU."""
    engine: Any
    """Options of the engine for this run."""
    ranks: int = 1
    """GPUs that shard weights, gradients and optimizer."""
    learner: bool = True
    sampler: bool = True
    tokens: int | None = None
    """Tokens of a micro-batch; None: the configuration's, or the fewest."""
    recomputed: bool | None = None
    """Whether layers are recomputed; None: as configured."""
    several_turns: bool = False
    """Whether the embedded engine keeps keys and values while environments answer."""
    total: int = 0
    """Bytes of the GPU with what other processes have, of which vLLM takes a share; 0: as `memory`."""
    samplers: int = 1
    """Processes that sample on this GPU."""

    def phases(self) -> Phases:
        """Return the bytes held, by phase and part."""
        c, shapes, engine = self.config, self.shapes, self.engine
        resident = self._learner_parts() if self.learner else {}
        parts: Phases = {phase: dict(resident) for phase in ("update", "generation", "publish")}
        if self.learner:
            parts["update"] |= self._update_parts()
            if c.lora is not None and c.lora.merge:
                parts["publish"]["merged weights"] = 4 * shapes.matrices // shapes.layers  # one layer at a time
        if self.sampler and isinstance(engine, VllmOptions):
            share = max(int((engine.gpu_memory_utilization or 0.0) * self._whole), self._least_of_vllm())
            for phase in parts.values():
                phase["vLLM (gpu_memory_utilization)"] = share * self.samplers
            if engine.sleep:
                del parts["update"]["vLLM (gpu_memory_utilization)"]
                parts["update"]["vLLM asleep"] = ASLEEP
        elif self.sampler:
            # the embedding is float32, and the head separate
            weights = self.samplers * (4 * shapes.vocabulary + engine_bytes(engine) * shapes.parameters)
            held = {part: self.samplers * size for part, size in self._generation_parts().items()}
            parts["generation"] |= {"engine weights": weights} | held
            parts["publish"]["engine weights"] = weights
            if not self.learner:
                parts["publish"]["a layer in float32"] = 4 * shapes.matrices // shapes.layers
        return {phase: held for phase, held in parts.items() if held}

    def fitted(self, *, share_given: bool = False) -> tuple[Budget, dict[str, Any]]:
        """Return the budget with values for `auto` keys, and slots of the embedded engine, that fit the GPU; and these
        values, `engine` as the options that change. `share_given`: vLLM's share of the memory is the user's."""
        c, engine, budget = self.config, self.engine, self
        values: dict[str, Any] = {}
        if self.learner and c.gradient_checkpointing == "auto":
            values["gradient_checkpointing"] = replace(self, recomputed=False)._left("update") < 0
            budget = replace(budget, recomputed=values["gradient_checkpointing"])
        if self.learner and c.tokens_per_microbatch == "auto":
            empty = replace(budget, tokens=0)
            each = empty._activations() + empty._mask_of_a_token(AT_MOST)
            tokens = max(0, empty._left("update")) // max(1, each)
            values["tokens_per_microbatch"] = max(AT_LEAST, min(AT_MOST, tokens))
            budget = replace(budget, tokens=values["tokens_per_microbatch"])
        if self.sampler and isinstance(engine, VllmOptions) and not share_given:
            share = self._share_of_vllm()
            if share > (engine.gpu_memory_utilization or 0.0):
                values["engine"] = {"gpu_memory_utilization": share}
        if self.sampler and isinstance(engine, LocalOptions):
            size = c.num_generations  # slots that one more prompt needs
            one, two = (replace(self, engine=replace(engine, slots=n * size))._left("generation") for n in (1, 2))
            slots = min(engine.slots, max(1, size + size * one // max(1, one - two)))
            if slots < engine.slots:
                values["engine"] = {"slots": slots}
        return replace(budget, engine=replace(engine, **values["engine"]) if "engine" in values else engine), values

    def require_room(self) -> Phases:
        """Return the phases. Raises ConfigError naming one that does not fit, its memory, and keys that reduce it."""
        phases = self.phases()
        for phase, held in phases.items():
            total = sum(held.values())
            if total > self.memory:
                largest = sorted(held.items(), key=lambda part: -part[1])[:3]
                shown = ", ".join(f"{name} {bytes_ / GIB:.1f} GiB" for name, bytes_ in largest)
                raise ConfigError(
                    f"device: the {phase} phase needs {total / GIB:.1f} GiB of {self.memory / GIB:.1f} GiB ({shown}); "
                    f"{self._remedy(phase)}"
                )
        return phases

    @property
    def _recomputes(self) -> bool:
        return self.config.gradient_checkpointing is True if self.recomputed is None else self.recomputed

    @property
    def _half_base(self) -> bool:
        c = self.config
        return c.lora is not None and c.dtype == "bfloat16" and self.shapes.in_bfloat16 and self.ranks == 1

    @property
    def _whole(self) -> int:
        return self.total or self.memory

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch."""
        given = AT_LEAST if self.config.tokens_per_microbatch == "auto" else self.config.tokens_per_microbatch
        return given if self.tokens is None else self.tokens

    def _left(self, phase: str) -> int:
        return int(USABLE * self.memory) - sum(self.phases().get(phase, {}).values())

    def _remedy(self, phase: str) -> str:
        c, engine, keys = self.config, self.engine, []
        if c.lora is None and self.learner:
            keys.append("set lora: {r: 16}")
        if phase == "update":
            keys += ["set optim: adamw_torch_8bit"] if c.lora is None and c.optim.startswith("adamw_torch") else []
            keys += ["set gradient_checkpointing: true"] if not self._recomputes else []
            keys += ["lower tokens_per_microbatch" if self._tokens > c.longest else "lower max_completion_length"]
        else:
            keys += ["lower engine.slots or max_completion_length"]
        if isinstance(engine, VllmOptions) and (phase != "update" or not engine.sleep):
            keys.append("lower engine.gpu_memory_utilization")
        return "; or ".join(keys)

    def _learner_parts(self) -> dict[str, int]:
        c, shapes, ranks = self.config, self.shapes, self.ranks
        weights = 4 * shapes.parameters
        if c.lora is not None:
            weights = 4 * shapes.vocabulary + (2 if self._half_base else 4) * shapes.matrices + 4 * shapes.trained
        parts = {"weights": weights // ranks, "optimizer": self._optimizer_bytes() // ranks}
        if c.keeps_reference and c.lora is None:
            parts["reference"] = 4 * shapes.parameters
        return parts

    def _optimizer_bytes(self) -> int:
        c, shapes = self.config, self.shapes
        each = OPTIMIZER.get(c.optim, 8)
        if c.optim == "sgd" and not c.optim_args.get("momentum"):
            each = 0
        elif c.optim_args.get("amsgrad"):
            each += each // 2
        elif c.optim == "adafactor" and c.optim_args.get("beta1") is not None:
            each = 4  # the first moment
        ends = 4 * (shapes.vocabulary + shapes.head) if c.optim == "muon" and c.lora is None else 0  # left to AdamW
        return each * shapes.trained + ends

    def _update_parts(self) -> dict[str, int]:
        c, shapes, ranks = self.config, self.shapes, self.ranks
        tokens = max(self._tokens, c.longest) if self._tokens else 0  # a longer row is a pass by itself
        parts = {"gradients": 4 * shapes.trained // ranks}
        if ranks > 1:  # unsharded: two layers, and both ends with gradients, which all layers share
            layer = shapes.matrices // shapes.layers
            parts["gathered weights"] = 2 * 4 * layer + 2 * 8 * shapes.vocabulary
        elif c.dtype in HALF:
            parts["half-precision copies"] = 2 * (shapes.parameters - (shapes.matrices if self._half_base else 0))
        parts["activations"] = tokens * self._activations()
        parts["mask of prefix trees"] = self._tokens * self._mask_of_a_token(self._tokens)
        parts["head"] = 3 * 4 * min(SLICE_ELEMENTS["cuda"], tokens * shapes.vocab_size)
        return parts

    def _mask_of_a_token(self, tokens: int) -> int:
        """Return the bytes per token in a pass of so many. Lanes wider than assumed pay only for few tokens."""
        c = self.config
        width = 0 if c.torch_compile else min(tokens, LANE_WIDTHS[-1] * c.longest)  # compiled: a mask by blocks
        return width * (2 if c.dtype in HALF else 4)

    def _activations(self) -> int:
        """Return the peak bytes per token in the backward pass: activations of all layers, and one's workspace."""
        c, shapes, half = self.config, self.shapes, self.config.dtype in HALF
        if self._recomputes:
            one = shapes.kept_by_layer(half, recomputed=False, lora=c.lora is not None)
            return 4 * shapes.hidden * (shapes.layers + 1) + int(0.7 * one)
        kept = shapes.layers * shapes.kept_by_layer(half, recomputed=shapes.recomputes, lora=c.lora is not None)
        if shapes.recomputes:  # recomputed activations, and gradients of a layer's matrices
            wide = 2 * shapes.hidden + shapes.queries + 2 * shapes.keys + 3 * shapes.intermediate
            kept += int((1.3 if half else 5) * wide)
        return kept

    def _generation_parts(self) -> dict[str, int]:
        c, shapes, each = self.config, self.shapes, engine_bytes(self.engine)
        slots = min(self.engine.slots, c.prompts_per_step * c.num_generations)
        tokens = -(-slots // max(1, c.num_generations)) * c.max_prompt_length
        attention = 4 * (2 * shapes.hidden + 6 * shapes.queries + 5 * shapes.keys)
        feed_forward = 8 * shapes.hidden + 3 * each * shapes.intermediate
        keys = slots * 64 * -(-c.longest // 64) * (shapes.kv_elements + 1) * each
        filtered = (not c.top_k and (c.top_p < 1 or c.min_p > 0)) or (not c.eval_top_k and c.eval_top_p < 1)
        return {
            "keys and values": keys,
            **({"keys and values between turns": keys} if self.several_turns else {}),
            "prompts": (tokens + c.max_prompt_length) * shapes.kv_elements * each,  # and once what all begin with
            "prefill": min(tokens, PREFILL_TOKENS) * max(attention, feed_forward),
            "logits": slots * shapes.vocab_size * (each + (25 if filtered else 8)),  # and weights; filters sort and sum
        }

    def _least_of_vllm(self, sequences: int = 0) -> int:
        """Return vLLM's minimum: weights, its largest pass, and keys and values of so many of the longest rollouts, of
        a group by default."""
        c, shapes, parts = self.config, self.shapes, getattr(self.engine, "tensor_parallel_size", 1)
        each = weight_bytes(self.engine, shapes)
        keys = (sequences or c.num_generations) * c.longest * shapes.kv_elements * each
        work = 2 * (4 * 256 * shapes.vocab_size) + VLLM_TOKENS * 4 * (shapes.hidden + shapes.intermediate)
        return (each * shapes.parameters + keys) // parts + work

    def _share_of_vllm(self) -> float:
        """Return the share of the GPU that vLLM needs; where it sleeps during updates, all that it can use of what
        generation leaves. At most `MOST_OF_VLLM`."""
        needs = self._least_of_vllm()
        percent = math.ceil(100 * needs / self._whole)
        if self.engine.sleep:
            rollouts = self.config.prompts_per_step * self.config.num_generations
            useful = self._least_of_vllm(min(self.engine.slots, rollouts))
            without = replace(self, engine=replace(self.engine, gpu_memory_utilization=None))
            room = min(without._left("generation"), without._left("publish")) // self.samplers + needs
            percent = max(percent, math.floor(100 * min(useful, room) / self._whole))
        return min(MOST_OF_VLLM, percent / 100)


def host_budget(c: RunConfig, shapes: Shapes, engine: Any, *, behind: int) -> Phases:
    """Return the bytes of weights that the learner's process holds on the host, next to a GPU, by phase.

    `engine`: its options. `behind`: steps whose weights the sampler keeps there, next to the newest."""
    whole, alone = 4 * shapes.parameters, c.lora is None
    kept = {"kept versions": (behind + 1) * whole} if behind else {}
    written = max(min(FILE_BYTES, whole), 4 * shapes.vocabulary) if alone else 0
    saved = 2 if shapes.in_bfloat16 and c.save_dtype != "float32" else 4
    asleep = {}
    if isinstance(engine, VllmOptions) and engine.sleep and c.adapters_alone is not None:
        asleep = {"update": {"weights of a sleeping vLLM, pinned": weight_bytes(engine, shapes) * shapes.parameters}}
    return asleep | {
        "start": {"weights": whole} | ({"reference": whole} if c.keeps_reference and alone else {}),
        "checkpoint": kept | {"file being written": written},
        "export": kept | {"weights": saved * shapes.parameters},
    }


def weight_bytes(engine: Any, shapes: Shapes) -> int:
    """Return the bytes of a weight in vLLM, whose default dtype is that of the saved model."""
    return 2 if engine.dtype in HALF or (engine.dtype is None and shapes.in_bfloat16) else 4


def engine_bytes(engine: Any) -> int:
    """Return the bytes of an engine's weight, key or value."""
    return 2 if getattr(engine, "dtype", None) in HALF else 4
