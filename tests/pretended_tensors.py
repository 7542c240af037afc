"""Tensors that say they are on a CUDA device, and what is known of operations on them; see `pretend_cuda`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .pretend_cuda import PretendCuda

CUDA = torch.device("cuda", 0)
_REAL_DEVICE = torch._C.TensorBase.device.__get__


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FACTORIES = _words(
    "empty zeros ones full arange linspace logspace eye rand randn randint randperm tensor as_tensor asarray "
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like empty_strided scalar_tensor "
    "tril_indices triu_indices"
)
NEW = _words("new_empty new_zeros new_ones new_full new_tensor")

SYNC = _words(
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive bincount equal is_nonzero histc "
    "repeat_interleave"
)
NO_KERNEL = _words(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh _local_scalar_dense "
    "is_nonzero set_ resize_ _has_compatible_shallow_copy_type is_same_size _unsafe_view"
)
# TensorIterator takes a CPU scalar together with CUDA tensors here.
SCALAR_OK = _words(
    "add sub rsub mul div pow eq ne lt le gt ge where maximum minimum remainder fmod floor_divide masked_fill fill "
    "bitwise_and bitwise_or bitwise_xor logical_and logical_or atan2 copy index_put _index_put_impl index_fill clamp "
    "lerp __rshift__ __lshift__ bitwise_right_shift bitwise_left_shift logaddexp xlogy nextafter _foreach_add "
    "_foreach_mul _foreach_div _foreach_lerp _foreach_addcdiv _foreach_addcmul"
)
NO_DETERMINISTIC = _words("histc put_ cumsum kthvalue nll_loss_forward ctc_loss")
"""Operations, of floats, that raise on the device after `torch.use_deterministic_algorithms(True)`."""
LIKE = _words("empty_like zeros_like _has_compatible_shallow_copy_type is_same_size")
"""Operations that only look at shape and type."""
INDEX_OK = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"}
"""Indices on the host are copied to the device: no error, but a wait."""
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
PRODUCTS = _words("mm addmm bmm baddbmm addmv mv dot")
"""Products of bfloat16, added up in float32 as on the device; a CPU without units for it takes 40 times as long."""


READ_BY_INDEX, WRITTEN_BY_INDEX = _words("index index_select gather"), _words("index_put index_copy index_fill")


def on_cuda(tensor: torch.Tensor) -> bool:
    if _REAL_DEVICE(tensor).type != "cpu":
        return False
    try:
        return getattr(tensor.untyped_storage(), "pretended", False)
    except (NotImplementedError, RuntimeError):
        return False


def storage_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # packed for oneDNN, on the meta device
        return 0


def traffic(base: str, given: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    """Return the bytes that an operation reads and writes, at least: rows that an index names, and no others."""

    def size(x: torch.Tensor) -> int:
        read_once = [n for n, step in zip(x.shape, x.stride(), strict=True) if step]
        return math.prod(read_once) * x.element_size()

    if base in READ_BY_INDEX:
        return 2 * sum(map(size, results))
    if base in WRITTEN_BY_INDEX:
        return 2 * sum(map(size, given[1:]))
    read = {(x.data_ptr(), x.shape): x for x in given}
    return sum(map(size, read.values())) + sum(map(size, results))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among values and in their lists."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def product(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Return a product of matrices in the type of its factors, computed in float32."""
    widened = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
    return func(*widened, **kwargs).to(args[0].dtype)


def mark(tensor: torch.Tensor, cuda: bool, gpu: PretendCuda) -> torch.Tensor:
    """Put the tensor's storage on the device, or take it off, and count its bytes."""
    if _REAL_DEVICE(tensor).type == "cpu":
        storage = tensor.untyped_storage()
        if cuda and not getattr(storage, "pretended", False):
            gpu.allocate(storage)
        storage.pretended = cuda  # type: ignore[attr-defined]
    return tensor
