"""Reward models: sequence-classification models with one output score a prompt with its completion.

They run in this process, in the thread of reward functions, without gradients. Imported only if one is used: workers
do without torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ...base.errors import ConfigError
from ...base.weights import weights_digest, without_embedding
from ...types import Message
from ..chat import applied, is_begun, with_text
from ..prompting import tokenizer_digest

TOKENS_AT_ONCE = 16_384
"""Tokens of a forward pass, padding included."""


class RewardModel:
    """A sequence-classification model with one output, as a reward function with TRL's signature.

    `model`: a directory, a hub name, or a loaded `AutoModelForSequenceClassification`, which keeps its device.
    `processing_class`: its tokenizer; None loads the one of the same name. As in TRL, its chat template joins messages,
    and plain texts are concatenated. On a CPU the weights become float32, elsewhere they keep their dtype. `device`
    None: it is checked here, and scores in other processes. A text that the model cannot score fails alone. Raises
    ConfigError for a model with several outputs or an untrained head.
    """

    def __init__(self, model: Any, processing_class: Any = None, *, device: str | None = "auto") -> None:
        self.source = model if isinstance(model, str) else str(getattr(model, "name_or_path", "") or "")
        self.model = _loaded(model, device) if isinstance(model, str) else model
        _require_one_output(self.model.config, self.source or type(self.model).__name__)
        if processing_class is None:
            if not self.source:
                raise ConfigError("reward_funcs: give a loaded reward model as RewardModel(model, its tokenizer)")
            processing_class = _from_pretrained(AutoTokenizer, self.source, "tokenizer")
        self.tokenizer = processing_class
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        rows, beyond = without_embedding(self.model, self.tokenizer)
        if beyond:
            raise ConfigError(
                f"reward_funcs: '{self.source}' has {rows} embeddings, and none for '{beyond[min(beyond)]}' (id "
                f"{min(beyond)}) of its tokenizer; call model.resize_token_embeddings({max(beyond) + 1}) and train it, "
                "or use the tokenizer that belongs to it"
            )
        self.model.eval()
        self.__name__ = Path(self.source).name or type(self.model).__name__
        self._digest = ""
        if device is None:
            self._digest = self.digest()
            self.model = None

    def digest(self) -> str:
        """Return a SHA-256 that changes with the weights, the vocabulary or the chat template."""
        if self._digest:
            return self._digest
        content = weights_digest(self.model.state_dict()) + tokenizer_digest(self.tokenizer)
        return hashlib.sha256(content.encode()).hexdigest()

    def require_chat_template(self) -> None:
        """Raise ConfigError if the model cannot score messages."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"reward_funcs: the prompts are lists of messages, but the tokenizer of '{self.__name__}' has no chat "
                "template; use a reward model with one, or give text prompts"
            )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | Exception | None]:
        """Return a score for each completion, or the error that prevented it."""
        scores: list[float | Exception | None] = [None] * len(completions)
        rows: dict[int, list[int]] = {}
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                rows[i] = self._encoded(prompt, completion)
            except Exception as error:  # any error of a chat template
                scores[i] = error
        for part in _parts(rows):
            for i, score in zip(part, self._scores([rows[i] for i in part]), strict=True):
                scores[i] = score
        return scores

    def _encoded(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            text = prompt + completion
        else:
            text = applied(self.tokenizer, _conversation(prompt, completion))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if not ids or (longest is not None and len(ids) > longest):
            raise ValueError(f"a text of {len(ids)} tokens, and the model takes 1 to {longest or 'any number'}")
        return ids

    @torch.inference_mode()
    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        """Return scores; rows are padded on the right, because models read the last token that is not padding."""
        ids = [torch.tensor(row, device=self.model.device) for row in rows]
        ids_BT = pad_sequence(ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        mask_BT = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        scores: list[float] = self.model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, 0].float().tolist()
        return scores


def _conversation(prompt: Sequence[Message], completion: Sequence[Message]) -> list[Message]:
    """Return prompt and completion, which may continue a turn begun by the prompt."""
    if not completion or not is_begun(prompt):
        return [*prompt, *completion]
    begun, first = prompt[-1], completion[0]
    turn = {**begun, **first, "content": with_text(begun, first.get("content") or "")["content"]}
    return [*prompt[:-1], turn, *completion[1:]]


def is_model(spec: Any) -> bool:
    """Return whether a reward function is a loaded model, which is callable, but not like this."""
    return isinstance(spec, torch.nn.Module) and hasattr(spec, "config")


def _parts(rows: dict[int, list[int]]) -> Iterator[list[int]]:
    """Yield keys of rows of similar length that share a forward pass."""
    part: list[int] = []
    for i in sorted(rows, key=lambda i: len(rows[i])):
        if part and (len(part) + 1) * len(rows[i]) > TOKENS_AT_ONCE:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


def _loaded(source: str, device: str | None) -> Any:
    _require_one_output(_from_pretrained(AutoConfig, source, "model"), source)
    scores_on = device or "auto"
    if scores_on == "auto":
        scores_on = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if scores_on == "cpu" else "auto"
    options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    model, info = _from_pretrained(AutoModelForSequenceClassification, source, "model", **options)
    if info["missing_keys"]:
        shown = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"reward_funcs: '{source}' lacks weights of a reward model, which would be random: {shown}")
    return model.requires_grad_(False).to("cpu" if device is None else scores_on)


def _require_one_output(config: Any, source: str) -> None:
    if (n := getattr(config, "num_labels", None)) != 1:
        kinds = ", ".join(getattr(config, "architectures", None) or ["of no known kind"])
        raise ConfigError(
            f"reward_funcs: '{source}' ({kinds}) has num_labels={n}; a reward model is a sequence-classification model "
            "with num_labels=1, whose only output is the score"
        )


def _from_pretrained(auto_class: Any, source: str, what: str, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # a directory may hold anything, and model loaders raise anything
        missing = "" if Path(source).is_dir() else " (no such directory, and not found as a hub name)"
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"reward_funcs: cannot load the {what} of '{source}'{missing}: {first}") from None
