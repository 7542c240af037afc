"""Facts about a Hugging Face model and tokenizer that engines need, and checks of weights against them."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import ConfigError
from ..base.weights import FiniteWeights, Weights, is_finite, specs_of, state_of, tied_names
from ..env.chat import MARK

WINDOWS = ("sliding_window", "attention_chunk_size")
"""Options of configurations that limit attention to a window."""


def has_local_layers(config: Any) -> bool:
    """Return whether some layers see a window of columns only, as in GPT-Neo, whose option is `window_size`."""
    return "local" in (getattr(config, "attention_layers", None) or ())


@dataclass(frozen=True)
class Facts:
    """Properties of a model and its tokenizer that an engine relies on."""

    vocab_size: int
    """Ids that can be sampled: ids above the tokenizer's last are padding of the vocabulary."""
    max_length: int | None
    """Maximum tokens per sequence; None: unlimited."""
    eos_ids: frozenset[int]
    """Ids that end a sequence: end-of-sequence ids and the special token that ends a turn in the chat template."""
    shapes: Mapping[str, torch.Size]
    """Shapes in the state dict."""
    tied: Mapping[str, str]
    """State-dict names that share their tensor with an earlier name."""
    expected: str = "the model's own state_dict() with adapters merged"
    """Description of `shapes`, for the error about other weights."""

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, max_length: int | None = None) -> Facts:
        """Return the facts; ignores weights. ValueError if `max_length`, the caller's limit, exceeds the model's."""
        vocab_size = n_tokens(model, tokenizer)
        return cls(
            vocab_size,
            _max_length(model, max_length),
            ends_of(model, tokenizer, vocab_size),
            {name: tensor.shape for name, tensor in model.state_dict().items()},
            tied_names(model),
        )

    def check_state(self, weights: Weights) -> Mapping[str, torch.Tensor]:
        """Return the state dict of `weights` with tied names filled in; a lazy one stays lazy.

        Raises ValueError naming missing, unknown, misshapen or non-finite tensors (not rechecked in `FiniteWeights`).
        """
        state: Mapping[str, torch.Tensor] = state_of(weights)
        shapes: dict[str, Any] = {name: spec.shape for name, spec in specs_of(weights).items()}
        filled: dict[str, torch.Tensor] = {}
        for pair in self.tied.items():
            for name, other in (pair, pair[::-1]):
                if name not in shapes and other in shapes:
                    filled[name], shapes[name] = state[other], shapes[other]
        missing, unknown = self.shapes.keys() - shapes.keys(), shapes.keys() - self.shapes.keys()
        if missing or unknown:
            raise ValueError(
                f"weights do not fit the engine's model: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]} "
                f"({len(missing)} and {len(unknown)} in all); pass {self.expected}"
            )
        for name, shape in shapes.items():
            if tuple(shape) != tuple(self.shapes[name]):
                raise ValueError(f"weight {name!r} has shape {list(shape)}, the engine needs {list(self.shapes[name])}")
        for name in () if isinstance(weights, FiniteWeights) else state:
            if not is_finite(state[name]):
                raise ValueError(f"weight {name!r} is not finite; the old weights stay in use")
        for name, source in self.tied.items():
            given = name in state and source in state
            if given and state[name] is not state[source] and not torch.equal(state[name], state[source]):
                raise ValueError(f"weights {name!r} and {source!r} differ, but the model ties them")
        return {**state, **filled} if isinstance(state, dict) else ChainMap(filled, state)  # type: ignore[arg-type]


def n_tokens(model: Any, tokenizer: Any) -> int:
    """Return the number of ids that can be sampled: up to the tokenizer's last, above its length if ids are skipped."""
    return int(min(max(tokenizer.get_vocab().values()) + 1, model.get_input_embeddings().num_embeddings))


def _max_length(model: Any, max_length: int | None) -> int | None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_length is not None and limit is not None and max_length > limit:
        raise ValueError(f"max_length {max_length} exceeds the model's {limit} positions")
    return max_length if max_length is not None else limit


def ends_of(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the ids that end a rollout: see `Facts.eos_ids`."""
    given = _eos_ids(model, tokenizer, model.config, getattr(model, "generation_config", None))
    return frozenset(i for i in given if 0 <= i < vocab_size) | _end_of_turn(tokenizer, vocab_size)


def end_where_rollouts_do(model: Any, tokenizer: Any) -> list[int]:
    """Put the ends of rollouts into the model's generation config, so that a saved policy ends there too; return them.

    Warns of an end of the model that its rollouts cannot sample, which is left out, and of one that is ordinary text.
    """
    vocab_size = n_tokens(model, tokenizer)
    ends = ends_of(model, tokenizer, vocab_size)
    generation = model.generation_config
    given = _eos_ids(model, model.config, generation)
    if beyond := sorted(i for i in given if i >= vocab_size):
        warnings.warn(
            f"model: eos_token_id {beyond[0]} is none of the {vocab_size} tokens that can be sampled and is left out; "
            "if it should end completions, call model.resize_token_embeddings(len(tokenizer)) with the tokenizer that "
            "has it",
            stacklevel=2,
        )
    special = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder}
    if ordinary := sorted((given & ends) - special):  # often the default of a class
        warnings.warn(
            f"model: eos_token_id {ordinary[0]} is '{tokenizer.convert_ids_to_tokens(ordinary[0])}', no special token, "
            "and completions end there; if they should not, set eos_token_id in its config and generation_config",
            stacklevel=2,
        )
    own = _eos_ids(model, generation)
    if ends and ends != own:
        listed = [*(i for i in own if i in ends), *sorted(ends - own)]
        generation.eos_token_id = listed if len(listed) > 1 else listed[0]
    _make_savable(generation)
    return sorted(ends)


def _make_savable(generation: Any) -> None:
    """Say of flags of sampling that they are meant: else transformers refuses to save them, after the training.

    Raises ConfigError if something else is wrong with the config.
    """
    unchanged = getattr(generation, "_original_object_hash", None) == hash(generation)
    before = generation.do_sample
    try:
        generation.validate(strict=True)
        return
    except ValueError:
        generation.do_sample = True
    try:
        generation.validate(strict=True)
    except ValueError as error:
        if unchanged:  # what was read is written again, with a warning
            generation.do_sample = before
            return
        raise ConfigError(f"model: its generation_config cannot be saved: {error}; correct it") from None


def _eos_ids(model: Any, *sources: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of a tokenizer or configs; each has no id, one id or a list."""
    eos_ids: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        given = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
        if wrong := [i for i in given if not isinstance(i, int) or isinstance(i, bool)]:
            kind = type(source).__name__
            raise ValueError(
                f"{model.config.name_or_path}: eos_token_id of its {kind} is {wrong[0]!r:.50}, no token id"
            )
        eos_ids |= set(given)
    return frozenset(eos_ids)


def _end_of_turn(tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the special token that the chat template puts after an assistant turn. Many tokenizers do not list it as
    end of sequence; a trained model that samples it would then continue generating."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    try:
        _, marked, tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(MARK)
    except Exception:  # no template, or it needs other turns
        return frozenset()
    ids = tokenizer.encode(tail.lstrip(), add_special_tokens=False) if marked else []
    special = ids and tokenizer.added_tokens_decoder.get(ids[0])
    return frozenset(ids[:1]) if special and special.special and ids[0] < vocab_size else frozenset()
