"""Methods by dotted path, and filters in a list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow import Trainer
from winnow.base.dotted import interface, load
from winnow.base.errors import ConfigError
from winnow.config import validate
from winnow.config.options import method
from winnow.engine import ENGINES
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.correct import CORRECTIONS, STEP_SCALES
from winnow.methods.filter import FILTERS, AllOf
from winnow.methods.gate import GATES
from winnow.methods.select import SELECTORS
from winnow.methods.size import ROLLOUT_BATCHES, SIZES, checked_additional_size, checked_size
from winnow.run.build_methods import build_methods
from winnow.run.inputs import TrainerInputs
from winnow.run.resolved import Options
from winnow.sampler import SYNCS
from winnow.tasks import ENVS
from winnow.types import GroupKind, Prompt

from .. import parity
from ..builders.groups import make_group
from ..builders.runs import _train_until, assert_clean, fingerprint, resume, train
from .fake_run import FakeRun

RULES = '''
from __future__ import annotations

from dataclasses import dataclass

from winnow.tasks.countdown import CountdownConfig
from winnow.methods.filter import Filter
from winnow.methods.size import GroupSize
from winnow.types import KEEP, Group, Verdict


@dataclass(frozen=True)
class Unbuildable(Filter):
    def build(self, *given: object) -> Filter:
        raise ValueError("no table of thresholds")

    def rule(self) -> None: ...


@dataclass(frozen=True)
class AtLeast(Filter):
    """Drop groups whose mean reward is too low."""

    mean: float = 0.5

    def __post_init__(self) -> None:
        if self.mean < 0:
            raise ValueError(f"mean must be >= 0, not {self.mean}")

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        mean = group.rewards().mean()
        return KEEP if mean >= self.mean else Verdict(False, f"mean reward {mean:.3g} < {self.mean:g}")


class Learned(Filter):
    refill = True
    wants_signal = True


@dataclass(frozen=True)
class Learning:
    filter_: str = ""

    def build(self, seed: int) -> object:
        return Learned() if self.filter_ == "" else self.filter_


@dataclass(frozen=True)
class Selects:
    def build(self, prompts: list, seed: int, judge: object) -> object:
        return object()


@dataclass(frozen=True)
class Sizes:
    def build(self, num_generations: int) -> object:
        return object()


@dataclass(frozen=True)
class Unsized:
    def build(self, num_generations: int) -> GroupSize:
        return FixedWithoutBounds()


class FixedWithoutBounds(GroupSize):
    def size_for(self, prompt: object) -> int:
        return 4


@dataclass
class Loose(Filter):
    pass


@dataclass(frozen=True)
class Empty:
    pass


class Plain:
    pass


@dataclass(frozen=True)
class Puzzles(CountdownConfig):
    pass


def function() -> None:
    pass
'''


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "winnow_test_rules.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "winnow_test_rules.py")


def test_every_table_knows_its_interface() -> None:
    builders = (SELECTORS, GATES, SIZES, ROLLOUT_BATCHES, ENGINES, ENVS, SYNCS, STEP_SCALES)
    assert all(interface(table) == ["build"] for table in builders)
    assert {"admit", "max_refill_rounds", "refill", "wants_signal", "state_dict"} <= set(interface(FILTERS))
    assert {"of_batch", "group_relative", "smallest_group", "greedy_baseline"} <= set(interface(ADVANTAGES))
    assert {"__call__", "active"} <= set(interface(CORRECTIONS))


class TestDottedPaths:
    def test_a_file_and_a_module_give_the_class_with_its_options(self, rules: str) -> None:
        for target in (f"{rules}:AtLeast", "winnow_test_rules.py:AtLeast", "winnow_test_rules:AtLeast"):
            assert method(FILTERS, target, "filter").mean == 0.5
            found = method(FILTERS, {"name": target, "mean": "2e-1"}, "filter")
            assert found.mean == 0.2
            assert not found.refill
            assert not found.admit(make_group(0, [0.0, 0.1]), GroupKind.SIGNAL).keep

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("winnow_test_rules:AtMost", r"filter: .*has no 'AtMost'. Did you mean 'AtLeast'"),
            ("winnow_test_rule.py:AtLeast", r"filter: 'winnow_test_rule.py': no such file. Did you mean"),
            ("no_such_module_at_all:X", r"filter: no module named 'no_such_module_at_all'"),
            ("winnow_test_rules:Plain", r"is a class; needs a frozen dataclass"),
            ("winnow_test_rules:function", r"is a function; needs a frozen dataclass"),
            ("winnow_test_rules:Loose", r"write @dataclass\(frozen=True\)"),
            (
                "winnow_test_rules:Empty",
                r"missing admit, admits_all, atol, .*, wants_signal; add them as in",
            ),
            ({"name": "winnow_test_rules:AtLeast", "maen": 1}, r"unknown option 'maen'. Did you mean 'mean'"),
            ({"name": "winnow_test_rules:AtLeast", "mean": "x"}, r"mean: Input should be a valid number"),
            ({"name": "winnow_test_rules:AtLeast", "mean": -1}, r"mean must be >= 0, not -1"),
            (":AtLeast", r"expected 'module:name' or 'path/to/file.py:name'"),
        ],
    )
    def test_what_cannot_be_used_is_refused(self, rules: str, spec: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            method(FILTERS, spec, "filter")

    def test_a_file_is_the_same_module_in_every_process(self, tmp_path: Path) -> None:
        """Ranks get a loss by the name of its module; Python's own hashes differ."""
        (tmp_path / "own.py").write_text("class Own: ...")
        code = "import sys; from winnow.base.dotted import load; print(load(sys.argv[1]))"
        command = [sys.executable, "-c", code, target := f"{tmp_path}/own.py:Own"]
        found = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
        assert found.stdout.strip() == str(load(target))

    def test_a_file_becomes_absolute_so_that_a_run_resumes_from_anywhere(self, rules: str) -> None:
        c = TrainerInputs("m", "countdown").config(
            {
                "filter": ["zero_variance", {"name": "winnow_test_rules.py:AtLeast", "mean": 0.1}],
                "selector": "winnow_test_rules.py:AtLeast",
                "gates": ["winnow_test_rules.py:AtLeast", "not_there.py:X"],
            }
        )
        assert c.filter == ["zero_variance", {"name": f"{rules}:AtLeast", "mean": 0.1}]
        assert (c.selector, c.gates) == (f"{rules}:AtLeast", [f"{rules}:AtLeast", "not_there.py:X"])


@pytest.mark.parametrize(
    ("key", "rule", "message"),
    [
        ("selector", "Selects", "selector: .*Selects builds a object, not a StreamSelector; derive from"),
        ("group_size", "Sizes", "group_size: .*Sizes builds a object, not a GroupSize; derive from"),
        ("group_size", "Unsized", "group_size: .*Unsized has no smallest; set it where it is built"),
    ],
)
def test_a_method_that_builds_something_else_is_refused(rules: str, key: str, rule: str, message: str) -> None:
    c = validate({"model": "m", "env": "e", key: f"winnow_test_rules:{rule}"})
    with pytest.raises(ConfigError, match=message):
        build_methods(c, Options.from_config(c), [Prompt("p", 0, text="x")])


def test_gates_that_are_listed_again_are_numbered_among_themselves() -> None:
    gates = [{"name": "random", "k": k} for k in (1, 2)]
    c = validate({"model": "m", "env": "e", "gates": [gates[0], "divergence", gates[1]]})
    assert Options.from_config(c).gate_names == ["random_1", "divergence", "random_2"]


def test_an_error_of_a_build_names_its_key(rules: str) -> None:
    for key in ("filter", "gates"):
        c = validate({"model": "m", "env": "e", key: "winnow_test_rules:Unbuildable"})
        with pytest.raises(ConfigError, match=f"^{key}: no table of thresholds"):
            build_methods(c, Options.from_config(c), [Prompt("p", 0, text="x")])


def test_an_audit_has_the_name_of_the_class_without_its_place() -> None:
    selector = "winnow.methods.select.greso:Greso"
    c = validate({"model": "m", "env": "e", "selector": selector, "audit": {"epsilon": 0.5}})
    prompts = [Prompt(str(i), i, text="x") for i in range(4)]
    methods = build_methods(c, Options.from_config(c), prompts)
    assert [audit.name for audit in methods.audits.every] == ["Greso"]


def test_a_size_out_of_its_bounds_is_named() -> None:
    prompt, size = Prompt("p", 0, text="x"), SIZES["fixed"]().build(4)
    assert checked_size(size, prompt) == 4
    size.size_for = lambda prompt: np.int64(4)
    assert type(checked_size(size, prompt)) is int
    for wrong in (5, 3, 4.0):
        size.size_for = lambda prompt, wrong=wrong: wrong
        with pytest.raises(
            ConfigError, match=f"group_size: .*size_for returned {wrong}; return a whole number from 4 to 4"
        ):
            checked_size(size, prompt)
    size.additional_size = lambda group, kind: 3
    with pytest.raises(
        ConfigError, match=r"group_size: .*additional_size returned 3; return a whole number from 0 to 2 here"
    ):
        checked_additional_size(size, make_group(0, [0.0, 1.0]), GroupKind.SIGNAL)


class TestLists:
    def build(self, filters: Any, **config: Any) -> Any:
        c = validate({"model": "m", "env": "e", "filter": filters} | config)
        return build_methods(c, Options.from_config(c), [Prompt("p", 0, text="x")]).filter

    def test_all_must_admit_and_the_reason_names_who_does_not(self, rules: str) -> None:
        every = self.build([{"name": "zero_variance", "max_refill_rounds": 3}, "winnow_test_rules:AtLeast"])
        assert isinstance(every, AllOf)
        assert (every.refill, every.max_refill_rounds, every.wants_signal) == (True, 3, True)
        assert every.admit(make_group(0, [0.0, 1.0]), GroupKind.SIGNAL).keep
        equal = every.admit(make_group(0, [1.0, 1.0]), GroupKind.EASY)
        assert equal.reason == "zero_variance: zero variance: all rewards are 1"
        low = every.admit(make_group(0, [0.0, 0.1]), GroupKind.SIGNAL)
        assert low.reason == "AtLeast: mean reward 0.05 < 0.5"

    def test_a_list_of_one_is_that_one(self) -> None:
        assert self.build(["keep_all"]) == FILTERS["keep_all"]()

    @pytest.mark.parametrize(
        ("filters", "config", "message"),
        [
            ([], {}, "the list is empty"),
            (["keep_all", "zero_variance"], {}, "keep_all has no effect with other filters"),
            (["zero_variance", "zero_variance"], {}, "zero_variance is listed twice"),
            (["zero_varianc"], {}, "Did you mean 'zero_variance'"),
            (["winnow_test_rules:AtLeast", "zero_variance"], {"advantage": "remax"}, "zero_variance skips groups"),
            ([{"name": "zero_variance", "refill": False, "max_refill_rounds": 2}], {}, "has no effect with refill"),
            ("winnow_test_rules:Learning", {"advantage": "remax"}, "Learning skips groups with equal rewards"),
            ({"name": "winnow_test_rules:Learning", "filter_": "x"}, {}, "Learning builds a str, not a Filter; derive"),
        ],
    )
    def test_what_has_no_effect_is_refused(self, rules: str, filters: Any, config: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.build(filters, **config)

    def test_a_filter_that_learns_says_itself_whether_it_refills(self, rules: str) -> None:
        more = {"rollout_batch": {"name": "adaptive", "surplus": "discard"}}
        assert self.build("winnow_test_rules:Learning", **more).refill

    def test_the_batch_is_filled_with_what_all_admit(self, rules: str, tmp_path: Path) -> None:
        outcomes: list[list[float | None]] = [[0.0, 0.0], [0.0, 0.2], [1.0, 0.0]]
        config = {
            "prompts_per_step": 2,
            "num_generations": 2,
            "max_steps": 2,
            "filter": ["zero_variance", "winnow_test_rules:AtLeast"],
        }
        run = FakeRun(tmp_path / "l", lambda v, n: outcomes[v.number % 3], config).run()
        batches = [[g.visit.number for g in batch] for batch in run.update.batches]
        assert batches == [[2, 5], [8, 11]]


def test_a_run_with_a_filter_of_its_own_resumes_bit_for_bit(
    tiny_config: dict[str, Any], rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config | {"filter": [{"name": "winnow_test_rules.py:AtLeast", "mean": 0.01}, "zero_variance"]}
    config |= {"max_steps": 3, "eval_steps": None}
    train(config | {"output_dir": str(tmp_path / "whole")})
    part = tmp_path / "part"
    _train_until(config | {"output_dir": str(part)}, 2)
    assert json.loads((part / "config.json").read_text())["filter"][0]["name"] == f"{rules}:AtLeast"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume(part)
    assert fingerprint(part) == fingerprint(tmp_path / "whole")
    assert_clean(part)


@pytest.mark.slow
def test_sampler_processes_find_it_too(tiny_config: dict[str, Any], rules: str, tmp_path: Path) -> None:
    """A task and a filter of one's own, from a folder that only the learner's working directory names."""
    config = tiny_config | {
        "env": {"name": "winnow_test_rules:Puzzles", "train_size": 16, "test_size": 4},
        "filter": {"name": "winnow_test_rules:AtLeast", "mean": 0.01},
        "sync": "processes",
        "max_lag": 1,
        "max_steps": 2,
        "eval_steps": None,
        "reward_funcs": [f"{parity.__file__}:parity_reward"],
    }
    Trainer(config=config).train()
    assert_clean(tmp_path / "run")
