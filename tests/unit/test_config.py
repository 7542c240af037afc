from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from winnow.base.errors import ConfigError
from winnow.config import apply_override, load_config, read_settings, validate
from winnow.config.options import method
from winnow.config.settings_yaml import read_yaml
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.filter import FILTERS
from winnow.run.resolved import TABLES

GOOD = {"model": "m", "env": "countdown"}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model: m\nenv: countdown\nfilter: zero_variance\nlearning_rate: 1e-4\n")
    config = load_config(path, ["filter.atol=1e-3", "max_steps=7", "env.count=4", "stop=[a, b]", "lora.r=4"])
    assert config.filter == {"name": "zero_variance", "atol": 1e-3}
    assert config.env == {"name": "countdown", "count": 4}
    assert (config.max_steps, config.stop, config.learning_rate) == (7, ["a", "b"], 1e-4)
    assert config.lora is not None
    assert config.lora.r == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rte": 1}, "unknown key 'learning_rte'. Did you mean 'learning_rate'?"),
        ({"max_staleness": 1}, "use `max_lag`"),
        ({"scale_rewards": "group"}, "advantage: grpo"),
        ({"max_steps": 0}, "max_steps: .*greater than or equal to 1"),
        ({"max_steps": "many"}, "max_steps: .*'many'"),
        ({"num_generations": 1}, "num_generations"),
        ({"loss_type": "ppo"}, "loss_type: .*'dapo'"),
        ({"max_lag": -1}, "max_lag"),
        ({"policy_loss": "plain", "epsilon_high": 0.3}, "epsilon_high: 0.3 has no effect.*policy_loss: clip"),
        ({"policy_loss": "plain", "epsilon": 0.3}, "epsilon: 0.3 has no effect.*policy_loss: clip"),
        ({"policy_loss": "plain", "importance_sampling_level": "sequence"}, "sequence has no effect"),
        ({"kl_estimator": "k1"}, "kl_estimator: k1 has no effect with beta: 0.*set beta"),
        ({"kl_in_reward": True}, "kl_in_reward: True has no effect with beta: 0.*set beta"),
        ({"kl_in_reward": True, "beta": 0.1, "kl_estimator": "k2"}, "kl_estimator: k2 has no effect with kl_in_reward"),
        ({"reference_kl_steps": 5, "beta": 0.1}, "reference_kl_steps: 5 has no effect with beta > 0.*remove one"),
        ({"reference_kl_steps": 0}, "reference_kl_steps: .*greater than or equal to 1"),
        ({"group_weighting": "tokens"}, "group_weighting: .*'equal'"),
        ({"lr_scheduler_type": "linear", "warmup_steps": 100}, "warmup_steps"),
        ({"lora": {"rank": 3}}, "unknown key 'lora.rank'. Known: .*dropout, merge"),
        ({"lora": {"drpout": 3}}, "unknown key 'lora.drpout'. Did you mean 'dropout'?"),
        ({"audit": {"epsilom": 0.1}}, "unknown key 'audit.epsilom'. Did you mean 'epsilon'?"),
        ({"audit": 0.05}, r"audit: expected a section.*not 0.05. Here use `audit: {epsilon: 0.05}`"),
        ({"reuse": 4}, r"reuse: expected a section.*not 4. Here use `reuse: {updates: 4}`"),
        ({"group_size": 16}, r"group_size: expected a name, or a section.*not 16. Here use `num_generations: 16`"),
        ({"reuse": {"updates": 2, "max_age": -1}}, r"reuse.max_age: .*\(got -1\)$"),
        ({"group_size": {"name": "fixed", 3: 4}}, r"group_size.dict\[str,any\].3.\[key\]: .*\(got 3\)$"),
        ({"filter": 3}, r"^config: filter: expected a name, or a section `{name: NAME}`, not 3$"),
        ({"gates": [5]}, r"^config: gates.0: expected a name, or a section `{name: NAME}`, not 5$"),
        ({"selector": None}, r"selector: expected a name, or a section `{name: NAME}`, not None$"),
    ],
)
def test_bad_values_name_the_key_and_the_remedy(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(GOOD | values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"env": {"name": "python_tool", "timeout_s": float("inf")}}, r"env\.timeout_s: inf cannot be saved"),
        ({"gates": [{"name": "divergence"}, {"name": "divergence", "k": float("nan")}]}, r"gates\.1\.k: nan cannot"),
    ],
)
def test_what_json_cannot_hold_is_named(values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(GOOD | values)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="missing key 'model'"):
        validate({"env": "countdown"})


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML"), ("- 1", "key: value"), ("\x00", "not valid YAML")],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("override", ["max_steps", "=3", "max_steps.x=3", "a=[1"])
def test_bad_overrides_are_named(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        apply_override({"max_steps": 1}, override)


def test_methods_are_found_by_name_and_validated() -> None:
    assert method(FILTERS, {"name": "zero_variance", "atol": "1e-3"}, "filter").atol == 1e-3
    assert method(ADVANTAGES, "rloo", "advantage") == ADVANTAGES["rloo"]()
    with pytest.raises(ConfigError, match=r"filter: unknown name 'zero_varience'. Did you mean 'zero_variance'"):
        method(FILTERS, "zero_varience", "filter")
    with pytest.raises(ConfigError, match=r"filter \(zero_variance\): unknown option 'atoll'. Did you mean 'atol'"):
        method(FILTERS, {"name": "zero_variance", "atoll": 1}, "filter")
    with pytest.raises(ConfigError, match="needs a `name`"):
        method(FILTERS, {}, "filter")
    with pytest.raises(ConfigError, match="It has no options"):
        method(FILTERS, {"name": "keep_all", "atol": 1}, "filter")
    with pytest.raises(ConfigError, match=r"\(zero_variance\): atol: .* greater than or equal to 0 \(got -1.0\)"):
        method(FILTERS, {"name": "zero_variance", "atol": -1.0}, "filter")
    with pytest.raises(ConfigError, match=r"atol: .*'small'"):
        method(FILTERS, {"name": "zero_variance", "atol": "small"}, "filter")


def test_the_resolved_config_reads_back_equal() -> None:
    config = validate(GOOD | {"filter": {"name": "zero_variance", "atol": 0.1}, "lora": {"r": 2}})
    assert validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_recipes_are_valid(path: Path) -> None:
    for overrides in [[], *([f"variant={name}"] for name in read_yaml(path).get("variants", {}))]:
        config = load_config(path, overrides)
        for field, table in TABLES.items():
            for spec in config.gates if field == "gates" else [getattr(config, field)]:
                if spec != "auto":
                    method(table, spec, field)


def test_a_variant_is_taken_by_name_and_overrides_win_over_it(tmp_path: Path) -> None:
    text = "model: m\nenv: countdown\nmax_lag: 4\nvariants:\n  slow: {learning_rate: 1.0e-5, max_lag: 8}\n  same: {}\n"
    path = write(tmp_path / "c.yaml", text)
    assert load_config(path).max_lag == load_config(path, ["variant=same"]).max_lag == 4
    slow = load_config(path, ["max_lag=2", "variant=slow"])
    assert (slow.learning_rate, slow.max_lag) == (1e-5, 2)
    with pytest.raises(ConfigError, match=r"c.yaml: variant: unknown name 'slwo'. Did you mean 'slow'"):
        load_config(path, ["variant=slwo"])


def test_an_override_into_a_default_section_keeps_the_default_method(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model: m\nenv: countdown\n")
    assert load_config(path, ["engine.slots=8"]).engine == {"name": "auto", "slots": 8}


@pytest.mark.parametrize(
    ("given", "override", "found"),
    [
        ({"success": None}, "success.at_least=0.5", {"success": {"at_least": 0.5}}),
        ({"success": 0.5}, "success.function=env", {"success": {"at_least": 0.5, "function": "env"}}),
        ({"success": "format"}, "success.at_least=0.5", {"success": {"function": "format", "at_least": 0.5}}),
        ({"lora": None}, "lora.r=8", {"lora": {"r": 8}}),
        ({"teacher": None}, "teacher.prompt=x", {"teacher": {"prompt": "x"}}),
        ({"teacher": "a/model"}, "teacher.weight=0.5", {"teacher": {"model": "a/model", "weight": 0.5}}),
        ({}, "save_dtype.*=bfloat16", {"save_dtype": {"*": "bfloat16"}}),
        ({}, "filter.atol=1", {"filter": {"name": "keep_all", "atol": 1}}),
        ({"env": "countdown"}, "env.x.filter.y=1", {"env": {"name": "countdown", "x": {"filter": {"y": 1}}}}),
        ({"env": {"agent": "a.py:f"}}, "env.agent.k=2", {"env": {"agent": {"name": "a.py:f", "k": 2}}}),
    ],
)
def test_an_override_reaches_into_what_is_written_short_or_left_out(
    given: dict[str, Any], override: str, found: dict[str, Any]
) -> None:
    assert read_settings(None, [override], given) == found


@pytest.mark.parametrize("override", ["model.x=1", "save_dtype.*=bfloat16", "gates.x=1"])
def test_a_value_that_is_no_name_is_no_section(override: str) -> None:
    given = {"model": "a/model", "save_dtype": "float32", "gates": ["random"]}
    with pytest.raises(ConfigError, match="is not a section"):
        read_settings(None, [override], given)


def test_the_order_of_overrides_of_a_section_and_its_keys_does_not_matter() -> None:
    for overrides in (["env=countdown", "env.count=4"], ["env.count=4", "env=countdown"]):
        assert read_settings(None, overrides, {"env": "math"}) == {"env": {"name": "countdown", "count": 4}}
