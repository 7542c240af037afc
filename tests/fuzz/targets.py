"""Every parser that sees foreign bytes, as a function of those bytes, with inputs to start from.

A target may raise what a command prints without a traceback (`EXPECTED`), nothing else; parsers of what a model says
may raise nothing at all. It must return within `HANG_S`, within `MEMORY_MIB`, and run nothing of what it reads.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from winnow.cli.console import EXPECTED

from . import states

HANG_S = 20
MEMORY_MIB = 4096


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes, Path], object]
    """Gives the bytes to a parser; the folder is its own, and emptied by whoever writes into it."""
    seeds: Callable[[], Sequence[bytes]]
    expected: tuple[type[Exception], ...] = EXPECTED
    words: tuple[str, ...] = ()
    """What inputs are also made of."""


def one_input(name: str, data: bytes) -> None:
    """Run a target in a folder of its own. Raises what the target must not."""
    target = TARGETS[name]
    try:
        target.run(data, _folder(name))
    except target.expected:
        return


@cache
def _folder(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# ---------------------------------------------------------------- data


def _rows(suffix: str) -> Callable[[bytes, Path], object]:
    def run(data: bytes, folder: Path) -> object:
        from winnow.env.dataset import DatasetConfig

        file = folder / f"rows{suffix}"
        file.write_bytes(data)
        task = DatasetConfig(str(file), test_size=0.5).build()
        for part in (task.train, task.test):
            for prompt in part:
                json.dumps(prompt.columns, default=str)
        return task.fingerprint()

    return run


ROWS = [
    {"prompt": "What is 1+1?", "answer": "2"},
    {"prompt": [{"role": "user", "content": "é 😀"}], "id": "a", "answer": None, "n": [1, 2.5e3]},
    {"prompt": "b", "answer": {"x": True}},
]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b'prompt,answer,n\n"a, b",1,2\nc,,3.5\n"d ""e""\nf",x,4\n'


COLUMNS = [{"prompt": "a", "answer": 1, "l": [1]}, {"prompt": "b", "l": []}, {"prompt": "c", "answer": 3, "l": [2, 3]}]


def _parquet(rows: Sequence[Mapping[str, Any]]) -> list[bytes]:
    import pyarrow
    import pyarrow.parquet

    found = []
    for compression in ("none", "snappy", "zstd"):
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), out, compression=compression)
        found.append(out.getvalue())
    return found


# ---------------------------------------------------------------- settings


def _overrides(data: bytes, folder: Path) -> object:
    """A YAML file, and below a line of `---` overrides, one a line."""
    from winnow.config import load_config

    head, _, tail = _text(data).partition("\n---\n")
    (folder / "c.yaml").write_text(head, "utf-8", "replace")
    return load_config(folder / "c.yaml", tail.splitlines())


SETTINGS = [
    b"model: m\nenv: {name: countdown}\noutput_dir: x\nstop: [a]\n---\nenv.test_size=5\nfilter.atol=1e-6\n",
    b"model: &a m\nenv: countdown\nrun_name: *a\nvariants: {v: {seed: 2}}\n---\nvariant=v\noutput_dir=x\n",
    b"{model: 1, lora: {r: 8, target_modules: [q_proj]}, temperature: .inf}\n---\nlearning_rate=1e-5\n",
]


# ---------------------------------------------------------------- what a model says


def _tool_calls(data: bytes, folder: Path) -> object:
    from winnow.env.tools import parse_tool_calls

    return [json.dumps(arguments) for _, arguments in parse_tool_calls(_text(data))]


def _react(data: bytes, folder: Path) -> object:
    from winnow.tasks.games.react import normal_form, parse_action

    return parse_action(_text(data)), normal_form(_text(data))


def _countdown(data: bytes, folder: Path) -> object:
    from winnow.tasks.countdown import countdown_reward

    text = _text(data)
    return [countdown_reward([text], [[1, 2, 3]], [6], [style]) for style in ("steps", "expression")]


def _exact(data: bytes, folder: Path) -> object:
    from winnow.env.rewards.math import same_answers

    return same_answers([_text(data), "\\boxed{1}"])


# ---------------------------------------------------------------- what an agent asks


def _request(data: bytes, folder: Path) -> object:
    from winnow.tasks.agents.messages import messages_of, tools_of

    given = json.loads(data)
    messages = messages_of(given.get("messages") if isinstance(given, dict) else given)
    return messages, tools_of(given.get("tools") if isinstance(given, dict) else None)


REQUEST = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}


# ---------------------------------------------------------------- run directories


@cache
def _run() -> Path:
    """A small run directory: a ledger, a checkpoint, metrics, samples."""
    from winnow.record.ledger import Ledger
    from winnow.run.checkpoint import save
    from winnow.sampler.drafts import Drafts

    from ..builders.ledgers import book_step

    folder = Path(tempfile.mkdtemp(prefix="fuzz-run-"))
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        ledger.set_meta("max_lag", "20")
        (folder / "start.json").write_text(json.dumps(ledger.mark()))
        for step in range(2):
            book_step(ledger, step)
        mark = ledger.mark()
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    loop: dict[str, Any] = {
        "step": 2,
        "num_tokens": 70,
        "num_decoded_tokens": 70,
        "solved_steps": 0,
        "undecided": "",
        "skipped_steps": 0,
        "unreplaced": 0,
        "in_flight": [[[1, 0, 3, {}], 4]],
    }
    loop |= {"waiting": [], "probes": [], "selector": {}, "group_size": {}, "filter": {}, "step_scale": {}, "gates": {}}
    loop |= {"reuse": None, "drafts": Drafts(False).state_dict()}
    state: dict[str, Any] = {"ledger": mark, "loop": loop, "config": {"model": "m"}}
    state |= {"fingerprints": {"task": "x"}, "offsets": {"metrics.jsonl": 9}, "seconds_total": 1.5, "code": {}}
    save(folder, 2, state, lambda d: (d / "w").write_bytes(b"w"), keep_last=2)
    (folder / "config.json").write_text('{"model": "m", "selector": {"name": "greso"}}')
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.5, "num_tokens": 3, "tokens/trained": 3, "ess_ratio": 0.2, "lag/max": 1}\n'
        '{"step": 2, "reward": 0.25, "num_tokens": 6, "eval/pass@1": 0.5, "lag/0/tokens": 5, "gate/bin/0/n": 3}\n'
    )
    sibling = {"completion": "x", "reward": 1.0, "fate": "trained", "turns": [], "advantage": 0.5}
    (folder / "samples.jsonl").write_text(
        json.dumps({"step": 1, "prompt": "p", "split": "train", "rollouts": [sibling, sibling | {"reward": None}]})
        + "\n"
    )
    return folder


def _page_of(file: str) -> Callable[[bytes, Path], object]:
    def run(data: bytes, folder: Path) -> object:
        from winnow.study.report import write_report

        shutil.copytree(_run(), folder, dirs_exist_ok=True)
        (folder / file).write_bytes(data)
        return write_report([folder], folder / "page.html")

    return run


def _file_of(name: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [next(_run().rglob(name)).read_bytes()]


def _ledger(data: bytes, folder: Path) -> object:
    from winnow.record.ledger import Ledger
    from winnow.run.checkpoint import marks

    shutil.copytree(_run(), folder, dirs_exist_ok=True)
    for suffix in ("-wal", "-shm", "-journal"):
        (folder / f"ledger.sqlite{suffix}").unlink(missing_ok=True)
    file = folder / "ledger.sqlite"
    file.write_bytes(data)
    with Ledger.open(file, read_only=True) as ledger:
        proof = ledger.verify(found := marks(folder))
        ledger.recurrence(), ledger.in_flight(), ledger.totals()
    whole = data == (_run() / "ledger.sqlite").read_bytes()
    assert proof.ok or not whole, f"a whole ledger was called damaged: {proof.problems}"
    with Ledger.open(file) as ledger:
        return ledger.rollback(list(found.values())[-1], reason="fuzz")


# ---------------------------------------------------------------- tables and tensors


def _gate_table(suffix: str) -> Callable[[bytes, Path], object]:
    def run(data: bytes, folder: Path) -> object:
        from winnow.study.gate_sweep import separation
        from winnow.study.gate_tables import read_recorded

        file = folder / f"gate{suffix}"
        file.write_bytes(data)
        return [separation(at, signal) for at in read_recorded(file).values() for signal in at.signals]

    return run


GATE_ROWS = [
    {"task_id": f"t{i}", "task_type": "x", "K": 2, "reward_var": i % 2 / 4, "action_entropy": 0.3 + i / 10, "steps": 9}
    for i in range(4)
]
GATE_CSV = (
    "\n".join([",".join(GATE_ROWS[0]), *(",".join(map(str, row.values())) for row in GATE_ROWS)]).encode() + b"\n"
)


def _profile(data: bytes, folder: Path) -> object:
    from winnow.methods.pass_rates import parse_profile, summary

    return summary(list(parse_profile(data, folder / "p.jsonl").values()))


def _head(data: bytes, folder: Path) -> object:
    from winnow.methods.gate.arrol.head import HeadWeights

    (folder / "head.safetensors").write_bytes(data)
    return HeadWeights.load(folder / "head.safetensors")


def _tensors() -> list[bytes]:
    import torch
    from safetensors.torch import save

    layers = {
        "0.weight": torch.ones(2, 3),
        "0.bias": torch.ones(2),
        "2.weight": torch.ones(1, 2),
        "2.bias": torch.ones(1),
    }
    from winnow.methods.gate.arrol.head import _NAMES

    named = dict(zip(_NAMES, layers.values(), strict=True))
    return [save(named | {"moments": torch.tensor([0.0, 1.0], dtype=torch.float64)}), save({"w": torch.ones(3)})]


@cache
def _model() -> Path:
    from ..pairs.world import make_model

    folder = Path(tempfile.mkdtemp(prefix="fuzz-model-"))
    make_model(folder)
    return folder


def _model_file(name: str) -> Callable[[bytes, Path], object]:
    def run(data: bytes, folder: Path) -> object:
        import torch

        from winnow.engine.loading import load_causal_lm, load_tokenizer, require_finite
        from winnow.env.prompting import encode_prompt
        from winnow.types import Prompt

        shutil.copytree(_model(), folder, dirs_exist_ok=True)
        (folder / name).write_bytes(data)
        if name.startswith("tokenizer"):
            tokenizer = load_tokenizer(folder)
            return encode_prompt(tokenizer, Prompt("p", 0, text="w1 p0 é")), tokenizer.decode([1, 2, 3])
        return require_finite(load_causal_lm(folder, torch.device("cpu")), "fuzz")

    return run


def _model_seed(name: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [(_model() / name).read_bytes()]


JSON_WORDS = ("NaN", "Infinity", "-0", "1e999", "9" * 400, "\\ud800", "\\u0000", "null", "[[[[", '{"a":', "true", "1.5")
CHAT_WORDS = (
    "<tool_call>",
    "</tool_call>",
    '{"name":"f","arguments":{}}',
    "[" * 200,
    "Action:",
    "```",
    "\u2028",
    "\x85",
)
MATHS = (
    "<answer>",
    "</answer>",
    "1 + 2 = 3 , 3 + 3 = 6",
    "(1+2)*3",
    "×",
    "÷",
    "\\boxed{",
    "\\frac{1}{2}",
    "((((",
    "^" * 9,
)

TARGETS = {
    "jsonl": Target(_rows(".jsonl"), lambda: [JSONL, b"\xef\xbb\xbf" + JSONL], words=JSON_WORDS),
    "json": Target(_rows(".json"), lambda: [json.dumps(ROWS).encode(), JSONL], words=JSON_WORDS),
    "csv": Target(_rows(".csv"), lambda: [CSV]),
    "gzip": Target(_rows(".jsonl.gz"), lambda: [gzip.compress(JSONL, mtime=0)]),
    "parquet": Target(_rows(".parquet"), lambda: _parquet(COLUMNS)),
    "yaml": Target(_overrides, lambda: SETTINGS, words=("&a", "*a", "<<:", "!!python/object", "variant=", "env.")),
    "tool_calls": Target(
        _tool_calls, lambda: [b'<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'], (), words=CHAT_WORDS
    ),
    "react": Target(_react, lambda: [b"Thought: look\nAction: [go to desk 1]."], (), words=CHAT_WORDS),
    "countdown": Target(_countdown, lambda: [b"<answer>1+2+3</answer>", b"1 + 2 = 3 , 3 + 3 = 6"], (), words=MATHS),
    "answers": Target(_exact, lambda: [b"so \\boxed{\\frac{1}{2}}", b"#### 1,000"], (), words=MATHS),
    "request": Target(_request, lambda: [json.dumps(REQUEST).encode()], (ValueError, RecursionError), words=JSON_WORDS),
    "manifest": Target(
        states.checkpoint("manifest.json", _run, seal=False), _file_of("manifest.json"), words=JSON_WORDS
    ),
    "state": Target(states.checkpoint("state.json", _run, seal=True), _file_of("state.json"), words=JSON_WORDS),
    "waiting": Target(states.resume("waiting"), states.seeds("waiting"), words=(*JSON_WORDS, '"O"')),
    "methods": Target(states.resume("methods"), states.seeds("methods"), words=JSON_WORDS),
    "ledger": Target(_ledger, _file_of("ledger.sqlite")),
    "metrics": Target(_page_of("metrics.jsonl"), _file_of("metrics.jsonl"), words=JSON_WORDS),
    "samples": Target(_page_of("samples.jsonl"), _file_of("samples.jsonl"), words=JSON_WORDS),
    "config_json": Target(_page_of("config.json"), _file_of("config.json"), words=JSON_WORDS),
    "gate_jsonl": Target(
        _gate_table(".jsonl"), lambda: ["".join(json.dumps(r) + "\n" for r in GATE_ROWS).encode()], words=JSON_WORDS
    ),
    "gate_csv": Target(_gate_table(".csv"), lambda: [GATE_CSV]),
    "gate_parquet": Target(_gate_table(".parquet"), lambda: _parquet(GATE_ROWS)),
    "profile": Target(
        _profile, lambda: [b'{"id": "q0", "n": 4, "correct": 2, "mean_reward": 0.5}\n'], words=JSON_WORDS
    ),
    "quality_head": Target(_head, _tensors),
    "model_weights": Target(_model_file("model.safetensors"), _model_seed("model.safetensors")),
    "model_config": Target(_model_file("config.json"), _model_seed("config.json"), words=(*JSON_WORDS, "auto_map")),
    "tokenizer": Target(_model_file("tokenizer.json"), _model_seed("tokenizer.json"), words=JSON_WORDS),
}
