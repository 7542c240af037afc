"""Cache, attention plan, slot table and stop strings on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.engine import Request, SamplingParams
from winnow.engine.local.cache import KVCache, padded, plan
from winnow.engine.local.llama import Linear
from winnow.engine.slots import COUNT, POSITION, Drawn, SlotTable
from winnow.engine.stops import StopTable

from .engine_models import byte_tokenizer, word_tokenizer

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 2000), max_size=150), st.sampled_from([1, 64, 4096]))
def test_plan_covers_every_row_once_with_enough_columns(lengths: list[int], size: int) -> None:
    chunks = plan(np.array(lengths, dtype=np.int64), size)
    rows = [row for chunk in chunks for row in range(chunk.start, chunk.stop)]
    assert rows == list(range(len(lengths)))
    assert all(chunk.columns >= max(lengths[chunk.start : chunk.stop]) for chunk in chunks)
    assert padded(chunks) >= sum(lengths)


def test_plan_splits_where_lengths_differ_much() -> None:
    lengths = np.array([1000] * 16 + [10] * 48)
    assert [tuple(c) for c in plan(lengths, 1024)] == [(0, 16, 1008), (16, 64, 16)]
    assert len(plan(np.full(256, 40), 1024)) == 1


def test_cache_keeps_contents_when_it_grows_and_moves_rows() -> None:
    cache = KVCache([((2, 4), (2, 3))], 100, torch.float32, CPU)
    cache.reserve(3, 10)
    assert (cache.rows, cache.columns) == (16, 64)
    keys, values = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 3)
    cache.insert(slice(0, 3), torch.tensor([0, 1, 2]), [keys], [values], [5, 2, 3])
    cache.reserve(3, 100)
    cache.reserve(17, 100)
    assert (cache.rows, cache.columns) == (32, 128)
    order = torch.tensor([2, 0, 1])
    cache.move(torch.arange(3), order, 5)
    for row, source in enumerate(order.tolist()):
        length = [5, 2, 3][source]
        assert torch.equal(cache.keys[0][row, :, :length], keys[source, :, :length])
        assert torch.equal(cache.values[0][row, :, :length], values[source, :, :length])
        assert torch.equal(cache.mask[row] == 0, torch.arange(cache.columns) < length)


def test_an_emptied_cache_begins_as_large_as_it_was_used() -> None:
    """Growing by and by again, with a copy each time, is what every step would do after it has made room."""
    cache = KVCache([((2, 4), (2, 3))], 200, torch.float32, CPU)
    for rows in (10, 40, 90):
        cache.reserve(rows, 70)
    cache.clear()
    cache.clear()  # twice: an update may follow another
    cache.reserve(3, 10)
    assert (cache.rows, cache.columns) == (96, 128)
    cache.clear()
    cache.reserve(3, 10)
    assert (cache.rows, cache.columns) == (16, 64), "as it was last used"


def test_cache_has_no_more_rows_than_slots_and_can_be_emptied() -> None:
    cache = KVCache([((2, 4), (2, 3))], 20, torch.float32, CPU)
    cache.reserve(17, 10)
    assert cache.rows == 20
    with pytest.raises(ValueError, match="21 rows in 20 slots"):
        cache.reserve(21, 10)
    cache.clear()
    assert (cache.rows, cache.columns, cache.keys[0].numel(), cache.mask.numel()) == (0, 0, 0, 0)
    cache.reserve(1, 5)
    assert cache.mask[0].tolist() == [0] + 63 * [-np.inf]


def test_open_unmasks_and_addresses_the_written_column() -> None:
    cache = KVCache([((3, 4), (3, 4))], 2, torch.float32, CPU)
    cache.reserve(2, 8)
    cache.insert(slice(0, 2), torch.tensor([0, 1]), [torch.zeros(2, 3, 4, 4)], [torch.zeros(2, 3, 4, 4)], [4, 2])
    index = cache.open(torch.tensor([4, 2]), 3)
    new = torch.randn(2, 3, 4)
    cache.keys[0].view(-1, 4)[index] = new
    assert torch.equal(cache.keys[0][0, :, 4], new[0])
    assert torch.equal(cache.keys[0][1, :, 2], new[1])
    assert (cache.mask[:, :6] == 0).sum(1).tolist() == [5, 3]


def request(name: str, length: int = 3) -> Request:
    return Request(name, (1,) * length, SamplingParams(5), key=2**64 - 1)


def test_slot_table_fills_holes_with_the_last_rows() -> None:
    table = SlotTable(8)
    table.append([request(name, i + 1) for i, name in enumerate("abcdef")], [0] * 6)
    table.record(slice(0, 6), Drawn(np.arange(6), -np.arange(6.0), None), weights=3)
    table.record(np.array([4, 0]), Drawn(np.array([40, 10]), -np.ones(2), None), weights=4)
    targets, sources = table.remove([1, 5, 2])
    assert (targets.tolist(), sources.tolist()) == ([1, 2], [3, 4])
    assert [r.id for r in table.requests] == ["a", "d", "e"]
    assert table.row_of == {"a": 0, "d": 1, "e": 2}
    assert table.tokens[:3].tolist() == [[0, 10, 0, 0, 0], [3, 0, 0, 0, 0], [4, 40, 0, 0, 0]]
    assert table.weights[:3, :2].tolist() == [[3, 4], [3, 0], [3, 4]]
    assert table.ints[POSITION, :4].tolist() == [1, 4, 5, 0]
    assert table.ints[COUNT, :3].tolist() == [2, 1, 2]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    merges = ["\n\n", "ab", "né", "é\n", "日", "本語", " END", "ENDE"]
    return {"bytes": byte_tokenizer(merges), "words": word_tokenizer()}


def first_stop(table: StopTable, stop_set: int, tokens: list[int]) -> int | None:
    """Where the engine would stop: the first token in the table that really completes a stop string."""
    for count in range(1, len(tokens) + 1):
        alert = table.alert[stop_set, tokens[count - 1]]
        if alert and table.completed(stop_set, np.array(tokens[:count])):
            return count
    return None


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), stops=st.sampled_from([("END",), ("né", "\n\n"), ("日本",), ("é\nab",), ("b日",)]))
def test_stop_strings_end_where_the_whole_text_first_has_them(
    tokenizers: dict[str, Any], seed: int, stops: tuple[str, ...]
) -> None:
    tokenizer = tokenizers["bytes"]
    table = StopTable(tokenizer, len(tokenizer), frozenset())
    rng = np.random.default_rng(seed)
    pieces = [t for text in (*stops, "né\n", "日本語", "ENab") for t in tokenizer(text).input_ids]
    pool = pieces + list(range(256, len(tokenizer)))
    tokens = rng.choice(pool, 30).tolist() + tokenizer(stops[0]).input_ids
    texts = [tokenizer.decode(tokens[:n]) for n in range(1, len(tokens) + 1)]
    expected = next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)
    stop_set = table.add(stops)
    assert first_stop(table, stop_set, tokens) == expected


def test_stop_strings_of_a_word_tokenizer_may_span_the_space(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["words"]
    table = StopTable(tokenizer, 60, frozenset({58}))
    across, plain = table.add(("w3 w4",)), table.add(("w7",))
    assert first_stop(table, across, [1, 3, 5, 3, 4, 9]) == 5
    assert first_stop(table, plain, [1, 7, 3]) == 2
    assert first_stop(table, plain, [17, 3]) is None
    assert table.alert[:, 58].all()
    assert table.alert[plain].sum() < 5


def test_few_tokens_are_looked_at(tokenizers: dict[str, Any]) -> None:
    table = StopTable(tokenizers["bytes"], 256, frozenset())
    assert (table.add(("END",)), table.add(("END",))) == (1, 1)
    assert table.alert[1].sum() <= 3


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float64, 1e-12)])
@pytest.mark.parametrize("n", [1, 130])
def test_linear_is_the_product_with_the_transposed_weight(dtype: torch.dtype, atol: float, n: int) -> None:
    gen = torch.Generator().manual_seed(n)
    weight, bias, x, before = (torch.randn(*s, generator=gen).to(dtype) for s in ((24, 40), (24,), (n, 40), (n, 24)))
    exact = x.double() @ weight.double().t()
    close = {"atol": atol * 40**0.5, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(Linear(weight)(x).double(), exact, **close)
    torch.testing.assert_close(Linear(weight, bias)(x).double(), exact + bias.double(), **close)
    after = before.clone()
    Linear(weight).add_to(after, x)
    torch.testing.assert_close(after.double(), before.double() + exact, **close)


def test_linear_keeps_a_copy() -> None:
    weight, x = torch.randn(8, 8), torch.randn(2, 8)
    linear = Linear(weight)
    product = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), product)
