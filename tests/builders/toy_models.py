"""Build a model of one table of logits, with its exact distribution."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM

from ..unit.learner_models import llama

V, PROMPT, BETA = 4, [7, 8], 0.7


SEQUENCES = list(itertools.product(range(V), repeat=2))


@cache
def model_of(seed: int) -> LlamaForCausalLM:
    model = llama().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@dataclass
class Toy:
    """Log-probabilities of the two tokens of every sequence, [16, 2]; those of the policy have a graph."""

    policy: torch.Tensor
    sampler: torch.Tensor
    reference: torch.Tensor
    policy_DV: tuple[torch.Tensor, torch.Tensor]
    """Whole distributions: [V] of the first token, [V, V] of the second."""
    reference_DV: tuple[torch.Tensor, torch.Tensor]


def distributions(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[*PROMPT, first] for first in range(V)])
    logp = model(input_ids=ids).logits[:, :, :V].log_softmax(-1)
    return logp[0, len(PROMPT) - 1], logp[:, len(PROMPT)]


def of_sequences(first_V: torch.Tensor, second_VV: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.stack([first_V[a], second_VV[a, b]]) for a, b in SEQUENCES])


def toy(on_policy: bool = False) -> Toy:
    policy, reference = distributions(model_of(0)), [x.detach() for x in distributions(model_of(2))]
    sampler = of_sequences(*distributions(model_of(0 if on_policy else 1))).detach()
    return Toy(of_sequences(*policy), sampler, of_sequences(*reference), policy, (reference[0], reference[1]))


def parameters() -> list[torch.Tensor]:
    return list(model_of(0).parameters())


def flat(gradients: Any) -> torch.Tensor:
    return torch.cat([g.reshape(-1) for g in gradients])


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-7 * float(1 + exact.abs().max()))
