"""Every entry of every method table against its protocol; size limits of the code itself."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import winnow
from winnow.engine import ENGINES, LocalEngine, ModelReference
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.correct import CORRECTIONS, STEP_SCALES, Evidence
from winnow.methods.filter import FILTERS
from winnow.methods.gate import GATES, GateContext, env_steps
from winnow.methods.group_kind import GroupJudge
from winnow.methods.select import SELECTORS
from winnow.methods.size import ROLLOUT_BATCHES, SIZES, GroupSize
from winnow.run.resolved import TABLES, all_methods
from winnow.types import EnvStep, GroupKind, GroupView, Prompt, Token, Visit

from ..builders.groups import make_group, make_rollout
from ..gates import ask

SOURCE = Path(winnow.__file__).parent
PROMPTS = [Prompt(f"p{i}", i, text=str(i)) for i in range(7)]
SELECTOR_OPTIONS: dict[str, dict[str, Any]] = {"pass_rate": {"refresh_steps": 1}}
ENTRIES = [(field, name) for field, table in TABLES.items() for name in table]


@pytest.mark.parametrize(("field", "name"), ENTRIES)
def test_options_are_a_documented_frozen_dataclass(field: str, name: str) -> None:
    cls = TABLES[field][name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert inspect.getdoc(cls)


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_advantages(name: str) -> None:
    advantage = ADVANTAGES[name]()
    rng = np.random.default_rng(0)
    assert advantage.smallest_group >= 2
    assert advantage.of_batch([]) == []
    for _ in range(20):
        groups = [make_group(n, list(rng.choice([0.0, 0.5, 1.0, None], size=6))) for n in range(3)]
        if advantage.greedy_baseline:
            for group in groups:
                group.rollouts.append(dataclasses.replace(make_rollout(6, 4, 0.5), greedy=True))
        for group, a in zip(groups, advantage.of_batch(groups), strict=True):
            assert a.shape == (len(group.rollouts),)
            assert a.dtype == np.float64
            np.testing.assert_array_equal(np.isnan(a), np.isnan(group.rewards()))


@pytest.mark.parametrize("name", list(FILTERS))
def test_filters(name: str) -> None:
    f = FILTERS[name]()
    for rewards in ([1.0, 0.0], [1.0, 1.0], [0.3, None, 0.7]):
        group = make_group(0, rewards)
        verdict = f.admit(group, GroupJudge().kind(group))
        assert verdict.keep or verdict.reason, "a rejection says why"
    assert f.admit(make_group(0, [1.0, 0.0]), GroupKind.SIGNAL).keep
    assert not f.refill or f.max_refill_rounds >= 1


@pytest.mark.parametrize("name", list(SELECTORS))
def test_selectors(name: str) -> None:
    def build() -> Any:
        return SELECTORS[name](**SELECTOR_OPTIONS.get(name, {})).build(PROMPTS, seed=3)

    selector = build()
    visits = []
    for n in (3, 1, 5, 8):
        got = selector.select(n)
        assert sum(v.verdict.keep for v in got) == n
        visits += got
        for v in got:
            group = make_group(v.number, [1.0, 0.0])
            group.visit = v
            selector.observe_group(group)
        selector.end_step()
    assert [v.number for v in visits] == list(range(len(visits)))
    for epoch in range(visits[-1].epoch):
        assert sorted(v.prompt.ordinal for v in visits if v.epoch == epoch) == list(range(7))
    assert [v.epoch for v in visits] == sorted(v.epoch for v in visits)
    if name != "thompson":  # mixed groups, too, change its draws
        assert [v.prompt.id for v in build().select(17)] == [v.prompt.id for v in visits if v.verdict.keep]
    assert all(isinstance(x, float) for x in selector.metrics().values())


@pytest.mark.parametrize("name", list(SELECTORS))
@pytest.mark.parametrize("k", [0, 3, 7, 12])
def test_selectors_resume(name: str, k: int) -> None:
    whole = SELECTORS[name](**SELECTOR_OPTIONS.get(name, {})).build(PROMPTS, seed=3)
    whole.select(k)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = SELECTORS[name](**SELECTOR_OPTIONS.get(name, {})).build(PROMPTS, seed=3)
    resumed.load_state_dict(state)
    assert resumed.select(9) == whole.select(9)


@pytest.mark.parametrize("name", list(GATES))
def test_gates(name: str) -> None:
    """Decides from the view alone: the same after a resume, at every gate point it names, whoever is asked first."""
    gate = GATES[name]().build(GateContext(name, seed=3))
    rule = gate.rule()
    assert isinstance(rule.at, Token) or list(env_steps(rule)) == sorted(set(env_steps(rule)))
    rng = np.random.default_rng(0)
    views = []
    for number in range(20):
        for k in env_steps(rule):
            lengths = rng.integers(0, k + 1, size=4)
            actions = tuple(tuple(rng.choice(["a", "b"], size=n).tolist()) for n in lengths)
            running = tuple(bool(n == k) for n in lengths)
            views.append(GroupView(Visit(number, 0, PROMPTS[0]), EnvStep(k), actions, actions, running))
    verdicts = rule.decide(views)
    assert all((v.keep or v.reason) and 0 < v.probability <= 1 for v in verdicts)
    gate.observe_group(make_group(0, [1.0, 0.0]))
    assert all(isinstance(x, float) and np.isfinite(x) for x in gate.metrics().values())
    gate.end_step()
    again = GATES[name]().build(GateContext(name, seed=3))
    again.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert again.rule().decide(views[::-1]) == [ask(gate, view) for view in views][::-1]


@pytest.mark.parametrize("name", list(SIZES))
def test_sizes(name: str) -> None:
    def build() -> GroupSize:
        size: GroupSize = SIZES[name]().build(8)
        size.begin(PROMPTS, GroupJudge())
        return size

    size = build()
    for prompt in PROMPTS:
        assert 2 <= size.smallest <= size.size_for(prompt) <= size.largest
        size.observe_group(make_group(prompt.ordinal, [1.0, 0.0, 0.0, 0.0]))
    size.observe_step({"frac_reward_zero_std": 0.5})
    again = build()
    again.load_state_dict(json.loads(json.dumps(size.state_dict())))
    assert [again.size_for(prompt) for prompt in PROMPTS] == [size.size_for(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", list(ROLLOUT_BATCHES))
def test_rollout_batches(name: str) -> None:
    batch = ROLLOUT_BATCHES[name]().build(8)
    assert isinstance(batch.carry, bool)
    for missing in range(9):
        for in_flight in range(9):
            n = batch.next(missing, in_flight, 0.5)
            assert n <= 0 or missing > in_flight, "never more in flight than are missing when a round starts"
            assert n > 0 or in_flight or not missing, "never idle while the batch lacks groups"


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_corrections(name: str) -> None:
    correct = CORRECTIONS[name]()
    torch.manual_seed(0)
    logp, sampler = torch.randn(2, 3, 5) - 2
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 2:] = False
    weights, metrics = correct(Evidence(logp.requires_grad_(), sampler, mask, torch.tensor([1.0, -1.0, 0.0])))
    assert torch.broadcast_shapes(weights.shape, (3, 5)) == (3, 5)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert not weights.requires_grad
    assert all(np.isfinite(v) for v in metrics.values())
    on_policy, _ = correct(Evidence(sampler, sampler, mask, torch.ones(3)))
    assert (on_policy == 1).all()


@pytest.mark.parametrize("name", list(STEP_SCALES))
def test_step_scales(name: str) -> None:
    scale, other = STEP_SCALES[name]().build(), STEP_SCALES[name]().build()
    assert scale(1.0) == 1.0
    assert 0 <= scale(0.01) <= 1.0
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert other(0.7) == scale(0.7)
    assert all(np.isfinite(v) for v in scale.metrics().values())


@pytest.mark.parametrize("name", sorted(ENGINES.keys() - {"vllm"}))  # that one beside the others: tests/scale
def test_engines(name: str, tiny_model: Path) -> None:
    """The protocol from outside; what is special to one engine has tests of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from winnow.engine import Finished, Reached, Request, SamplingParams

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    engine = ENGINES[name]().build(ModelReference("", model.device, model), tokenizer)
    assert engine.version == 0
    assert engine.step() == []
    prompt = tuple(tokenizer.encode("numbers 3 5 8 target 16 :"))
    params = SamplingParams(10)
    engine.submit([Request((0, i), prompt, params, key=i, report_at=(2,)) for i in range(3)])
    with pytest.raises(ValueError, match="already in use"):
        engine.submit([Request((0, 0), prompt, params, key=0)])
    assert engine.pending == 3
    reached, finished = [], []
    cancelled = engine.cancel([(0, 2), "unknown"])
    assert [c.id for c in cancelled] == [(0, 2)]
    while engine.pending:
        for event in engine.step():
            (reached if isinstance(event, Reached) else finished).append(event)
        if engine.version == 0:
            engine.load_weights(model.state_dict(), 1)
    assert sorted(f.id for f in finished) == [(0, 0), (0, 1)]
    for f in finished:
        assert isinstance(f, Finished)
        assert len(f.token_ids) == len(f.logp) == len(f.versions) <= 10
        assert f.versions[0] == 0
        assert (f.versions[1:] == 1).all()
        assert f.stop_reason in ("eos", "length")
    for r in reached:
        assert r.n == 2 == len(r.logp)
    broken = {k: torch.full_like(v, float("nan")) for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="finite"):
        engine.load_weights(broken, 2)
    assert engine.version == 1


def test_the_catalogue_names_files_that_exist() -> None:
    for m in all_methods():
        assert (SOURCE.parent / m["file"]).is_file()
        assert len(m["summary"]) > 10
        assert "(" not in m["summary"].split()[0], "a docstring of its own, not the signature dataclasses put there"


def test_the_catalogue_says_what_engines_provide() -> None:
    provides = {m["name"]: set(m["provides"]) for m in all_methods() if m["field"] == "engine"}
    assert provides == {"local": LocalEngine.provides, "vllm": LocalEngine.provides | {"adapters"}}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_functions_and_signatures_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"
            arguments = [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
            is_command = "command(app)" in map(ast.unparse, node.decorator_list)  # each option is an argument
            assert is_command or len(arguments) <= 8, f"{node.name} has {len(arguments)} arguments"


def test_the_package_imports_without_torch() -> None:
    """Worker processes of reward functions must start fast."""
    import subprocess
    import sys

    code = "import winnow, winnow.env.workers.worker, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_tests_build_with_builders_and_not_with_one_another() -> None:
    imports = re.compile(r"^\s*from [\w.]*\btest_\w+ import", re.MULTILINE)
    tests = Path(__file__).parents[1]
    assert [path.name for path in tests.rglob("*.py") if imports.search(path.read_text(encoding="utf-8"))] == []
