"""What a run refuses, at the start and on a resume, and what it then leaves untouched."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow import ConfigError, RunConfig, Trainer
from winnow.config.paths import as_saved
from winnow.record.records import RunDirectoryError
from winnow.record.stop_conditions import RunStoppedError
from winnow.run.checkpoint import CheckpointError
from winnow.run.inputs import refuse_changes
from winnow.run.standalone import evaluate_model

from ..builders.runs import CARRYING, assert_clean, fingerprint, resume, train
from ..parity import parity_reward

CONTINUOUS = {"name": "in_process", "lag": "continuous"}


class TestRefusals:
    def test_a_used_directory(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 1})
        with pytest.raises(RunDirectoryError, match="winnow resume"):
            train(tiny_config)

    def test_a_changed_key_on_resume(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 1})
        run = Path(tiny_config["output_dir"])
        with pytest.raises(ConfigError, match="learning_rate: cannot change"):
            resume(run, {"learning_rate": 1.0})
        values = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(values | {"learning_rate": 0.5}))
        with pytest.raises(ConfigError, match=r"learning_rate: was 0.001, is 0.5"):
            resume(run)

    @pytest.mark.parametrize("text", ["[]", '"x"', '{"model": ', ""])
    def test_a_damaged_configuration(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "ledger.sqlite").touch()
        for use in (Trainer.resume, lambda path: evaluate_model(str(path), {})):
            with pytest.raises(RunDirectoryError, match=r"config\.json"):
                use(tmp_path)

    @pytest.mark.parametrize(
        ("targets", "words"),
        [(["lm_head"], "lm_head is the embedding"), (["embed_tokens"], "embed_tokens is"), (["q_proj", "x"], "'x'")],
    )
    def test_adapters_on_what_cannot_have_them(
        self, tiny_config: dict[str, Any], targets: list[str], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"lora: target_modules: .*{words}"):
            Trainer(config=tiny_config | {"lora": {"r": 2, "target_modules": targets}})

    def test_adapters_alone_for_an_engine_of_whole_weights(self, tiny_config: dict[str, Any]) -> None:
        with pytest.raises(
            ConfigError, match=r"merge: false .* engine: local takes whole weights; set lora.merge: true"
        ):
            Trainer(config=tiny_config | {"lora": {"r": 2, "merge": False}})

    def test_more_steps_on_resume_are_fine(self, tiny_config: dict[str, Any], tmp_path: Path) -> None:
        train(tiny_config | {"max_steps": 2})
        run = Path(tiny_config["output_dir"])
        resume(run, {"max_steps": 4})
        whole = tmp_path / "whole"
        train(tiny_config | {"output_dir": str(whole)})
        assert fingerprint(run) == fingerprint(whole)

    def test_a_changed_task_or_tokenizer(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 1})
        run = Path(tiny_config["output_dir"])
        state_file = next((run / "checkpoints").glob("*/state.json"))
        text = state_file.read_text()
        for name in ("task", "tokenizer"):
            state = json.loads(text)
            state["fingerprints"][name] = "0" * 64
            state_file.write_text(json.dumps(state))
            _resign(state_file.parent)
            with pytest.raises(ConfigError, match=f"the {name} is not the one"):
                resume(run, {"max_steps": 2})

    def test_a_damaged_checkpoint(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 1})
        run = Path(tiny_config["output_dir"])
        victim = next((run / "checkpoints").glob("*/optimizer.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=r"optimizer.safetensors: damaged"):
            resume(run)

    def test_a_missing_model(self, tiny_config: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="no such directory"):
            train(tiny_config | {"model": "/no/such/model"})

    def test_evaluation_without_held_out_prompts(self, tiny_config: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="no held-out prompts"):
            train(tiny_config | {"env": {"name": "countdown", "train_size": 8, "test_size": 0}})

    def test_a_directory_in_use(self, tiny_config: dict[str, Any]) -> None:
        from winnow.record.records import lock

        run = Path(tiny_config["output_dir"])
        trainer = Trainer(config=tiny_config, reward_funcs=parity_reward)
        run.mkdir()
        held = lock(run)
        with pytest.raises(RunDirectoryError, match="another run is using"):
            trainer.train()
        held.close()


def _resign(checkpoint: Path) -> None:
    from winnow.run.checkpoint import MANIFEST, _write_manifest

    step = json.loads((checkpoint / MANIFEST).read_text())["step"]
    (checkpoint / MANIFEST).unlink()
    _write_manifest(checkpoint, step)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"correction": "truncate", "epsilon": 0.1}, "epsilon: 0.1 has no effect.*num_iterations: 1.*more iterations"),
        ({"correction": "m2po", "epsilon_high": 0.28}, "epsilon_high: 0.28 has no effect"),
        ({"correction": "truncate", "importance_sampling_level": "sequence"}, "sequence has no effect"),
        ({"step_scale": {"name": "ess", "measured_steps": 3}}, "measured_steps has no effect with reference: 1.0"),
        ({"advantage": {"name": "opob", "eps": 1e-3}}, "eps has no effect without scale"),
        ({"correction": {"name": "mask", "high": None, "weigh": False}}, "mask nothing"),
    ],
)
def test_options_of_the_update_without_effect(
    tiny_config: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(config=tiny_config | values, reward_funcs=parity_reward)


@pytest.mark.parametrize(
    "values",
    [
        {"correction": "truncate", "epsilon": 0.1, "num_iterations": 2},
        {"correction": {"name": "mask", "weigh": False}, "epsilon": 0.1},
        {"correction": "none", "importance_sampling_level": "sequence"},
    ],
)
def test_options_of_a_ratio_that_can_differ_from_one_are_accepted(
    tiny_config: dict[str, Any], values: dict[str, Any]
) -> None:
    Trainer(config=tiny_config | values, reward_funcs=parity_reward)


class TestOneRunOneDirectory:
    """What an independent review broke."""

    def test_a_trainer_trains_once(self, tiny_config: dict[str, Any]) -> None:
        trainer = Trainer(config=tiny_config | {"max_steps": 1}, reward_funcs=parity_reward)
        trainer.train()
        with pytest.raises(RunDirectoryError, match="runs once"):
            trainer.train()
        assert_clean(Path(tiny_config["output_dir"]))

    def test_a_second_trainer_of_the_same_directory_is_refused(self, tiny_config: dict[str, Any]) -> None:
        first, second = (Trainer(config=tiny_config | {"max_steps": 1}, reward_funcs=parity_reward) for _ in range(2))
        first.train()
        file = Path(tiny_config["output_dir"]) / "config.json"
        with pytest.raises(RunDirectoryError, match=rf"output_dir: {file} is a file; choose another"):
            Trainer(config=tiny_config | {"output_dir": str(file / "x")}, reward_funcs=parity_reward)
        with pytest.raises(RunDirectoryError, match="already holds a run"):
            second.train()
        assert_clean(Path(tiny_config["output_dir"]))

    def test_a_resume_with_other_rewards_is_refused(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 1})
        with pytest.raises(ConfigError, match="reward functions is not the one"):
            Trainer.resume(tiny_config["output_dir"], {"max_steps": 2}).train()

    def test_rewards_given_by_name_are_resumed(self, tiny_config: dict[str, Any], tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text("def f(completions, **_):\n    return [float(len(c) % 2) for c in completions]\n")
        Trainer(config=tiny_config | {"max_steps": 1}, reward_funcs=[f"{file}:f"]).train()
        Trainer.resume(tiny_config["output_dir"], {"max_steps": 2}).train()
        lines = (Path(tiny_config["output_dir"]) / "metrics.jsonl").read_text().splitlines()
        assert "rewards/f/mean" in json.loads(lines[-1])

    @pytest.mark.cases(one_in=3)
    @pytest.mark.parametrize(
        "options", [{"lora": {"r": 2}}, {"beta": 0.1}, {"reference_kl_steps": 1}], ids=["lora", "kl", "drift"]
    )
    def test_a_changed_base_model_is_refused(
        self, tiny_config: dict[str, Any], tiny_model: Path, tmp_path: Path, options: dict
    ) -> None:
        import shutil

        from safetensors.torch import load_file, save_file

        model = tmp_path / "copy"
        shutil.copytree(tiny_model, model)
        train(tiny_config | options | {"model": str(model), "max_steps": 1})
        weights = load_file(model / "model.safetensors")
        save_file({k: v * 1.5 for k, v in weights.items()}, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match="base model is not the one"):
            resume(Path(tiny_config["output_dir"]), {"max_steps": 2})

    def test_fewer_steps_than_done_are_refused(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 2})
        with pytest.raises(ConfigError, match="the run is at step 2"):
            resume(Path(tiny_config["output_dir"]), {"max_steps": 1})

    def test_more_steps_of_a_linear_schedule_are_refused(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 2, "lr_scheduler_type": "linear"})
        with pytest.raises(ConfigError, match=r"max_steps: was 2, is 4 .learning rates depend on it, by lr_sch"):
            resume(Path(tiny_config["output_dir"]), {"max_steps": 4})

    def test_more_steps_would_lengthen_a_warm_up_that_is_a_share(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 2, "warmup_steps": 0.5})
        with pytest.raises(ConfigError, match=r"max_steps: was 2, is 20 .learning rates depend on it, by warmup_steps"):
            resume(Path(tiny_config["output_dir"]), {"max_steps": 20})

    def test_more_steps_may_leave_a_warm_up_as_it_was(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 2, "warmup_steps": 0.1})
        resume(Path(tiny_config["output_dir"]), {"max_steps": 3})

    @pytest.mark.cases(one_in=5)
    @pytest.mark.parametrize(
        "schedule",
        [
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1},
            {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 1},
            {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 5}},
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_stable_steps": 1, "num_decay_steps": 1, "min_lr_ratio": 0.1},
            },
        ],
        ids=lambda schedule: "-".join(map(str, schedule.values())),
    )
    def test_more_steps_of_a_schedule_without_an_end(
        self, tiny_config: dict[str, Any], schedule: dict[str, Any]
    ) -> None:
        """The resumed run is, rate for rate, the run that had them from the start."""
        run = Path(tiny_config["output_dir"])
        train(tiny_config | schedule | {"max_steps": 2})
        resume(run, {"max_steps": 4})
        train(tiny_config | schedule | {"max_steps": 4, "output_dir": f"{run}-whole"})
        assert fingerprint(run) == fingerprint(Path(f"{run}-whole"))

    @pytest.mark.parametrize(
        "schedule",
        [
            {"lr_scheduler_type": "cosine"},
            {"lr_scheduler_type": "polynomial"},
            {"lr_scheduler_type": "warmup_stable_decay", "lr_decay_steps": 1},
            {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 0.5},
        ],
        ids=lambda schedule: schedule["lr_scheduler_type"],
    )
    def test_more_steps_of_a_schedule_with_an_end_are_refused(
        self, tiny_config: dict[str, Any], schedule: dict[str, Any]
    ) -> None:
        run = Path(tiny_config["output_dir"])
        begun = RunConfig(**tiny_config | schedule | {"max_steps": 2})
        longer = begun.model_copy(update={"max_steps": 8})
        with pytest.raises(ConfigError, match=r"max_steps: was 2, is 8 .learning rates depend on it"):
            refuse_changes(run, as_saved(begun), longer)

    def test_a_resumed_run_has_no_stale_model(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 1})
        run = Path(tiny_config["output_dir"])
        trainer = Trainer.resume(run, {"max_steps": 2}, reward_funcs=parity_reward)
        trainer.add_callback(SimpleNamespace(on_step_end=lambda *_, **__: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert not (run / "model").exists()

    def test_metrics_shorter_than_the_checkpoint_are_refused(self, tiny_config: dict[str, Any]) -> None:
        train(tiny_config | {"max_steps": 1})
        run = Path(tiny_config["output_dir"])
        (run / "metrics.jsonl").write_text("")
        with pytest.raises(RunDirectoryError, match="restore the file"):
            resume(run, {"max_steps": 2})

    def test_a_stop_without_an_update_is_no_step(self, tiny_config: dict[str, Any]) -> None:
        config = tiny_config | {"filter": {"name": "zero_variance", "max_refill_rounds": 1}, "max_steps": 2}

        def equal(completions: list[str], **_: object) -> list[float]:
            return [0.0] * len(completions)

        with pytest.raises(RunStoppedError):
            Trainer(config=config, reward_funcs=equal).train()
        for _ in range(3):
            with pytest.raises(RunStoppedError, match="step 0"):
                Trainer.resume(config["output_dir"], reward_funcs=equal).train()

    def test_nor_is_one_of_a_task_that_was_solved_before(self, tiny_config: dict[str, Any]) -> None:
        config = tiny_config | {"filter": {"name": "zero_variance", "max_refill_rounds": 1}, "max_steps": 2}

        def equal(completions: list[str], **_: object) -> list[float]:
            return [1.0] * len(completions)

        assert Trainer(config=config, reward_funcs=equal).train()["step"] == 0
        assert Trainer.resume(config["output_dir"], reward_funcs=equal).train()["step"] == 0
        assert_clean(Path(config["output_dir"]))


class TestRefusedAtTheStart:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_completion_length": 100_000}, "100000, but the engine takes 512 tokens"),
            ({"max_prompt_length": 2}, "over max_prompt_length=2"),
            ({"stop": [""]}, "stop.0: String should have at least 1 character"),
            ({"temperature": 1e-9}, "temperature"),
            ({"device": "cuda:99"}, "device"),
            (
                {"filter": "zero_variance", "advantage": "remax"},
                "filter: zero_variance skips groups with equal",
            ),
            ({"selector": "greso", "advantage": "reinforce_pp"}, "selector: greso skips groups with equal rewards"),
            (
                {"rollout_batch": "adaptive", "filter": "zero_variance", "max_lag": 1, "policy_loss": "plain"},
                "set correction: truncate, or policy_loss: clip",
            ),
            ({"audit": {"epsilon": 1e-300}, "selector": "greso"}, "epsilon"),
            ({"max_lag": 2, "policy_loss": "plain"}, "max_lag: 2 trains on tokens of older policies"),
            ({"num_iterations": 2, "policy_loss": "plain"}, "num_iterations: 2 trains on tokens of older policies"),
            ({"sync": {"name": "in_process", "lag": "mixed"}}, "sync: options of in_process have no effect"),
            ({"max_lag": 2, "sync": {"name": "in_process", "lag": "some"}}, "lag"),
            ({"sync": {"name": "in_process", "overlap": True}}, "sync: overlap: .* allow it with max_lag: 1"),
            (CARRYING | {"sync": {"name": "in_process", "overlap": True}}, "sync: overlap: .* max_lag: 2"),
            ({"sync": CONTINUOUS}, "sync: options of in_process have no effect without a lag"),
            ({"max_lag": 1, "sync": CONTINUOUS | {"overlap": True}}, "sync: overlap: .* allow it with max_lag: 2"),
            (CARRYING | {"sync": CONTINUOUS}, "rollout_batch: has no effect with sync: lag: continuous"),
            (
                {"max_lag": 1, "matmul_precision": "medium", "sync": {"name": "in_process", "overlap": True}},
                "sync: overlap: not with matmul_precision: medium",
            ),
            ({"rollout_batch": "adaptive", "filter": "zero_variance"}, "max_lag: 1, or choose surplus: discard"),
            ({"rollout_batch": {"name": "fixed", "surplus": "discard"}}, "filter that refills"),
            ({"max_grad_norm": float("inf")}, "max_grad_norm"),
            ({"reward_timeout_s": float("inf")}, "reward_timeout_s"),
            ({"filter": {"name": "zero_variance", "atol": float("inf")}}, "JSON"),
        ],
    )
    def test_and_nothing_is_written(self, tiny_config: dict[str, Any], options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Trainer(config=tiny_config | options, reward_funcs=parity_reward)
        assert not Path(tiny_config["output_dir"]).exists()

    @pytest.mark.parametrize("damage", ["missing", "truncated", "nan"])
    def test_a_damaged_model(self, tiny_config: dict[str, Any], tiny_model: Path, tmp_path: Path, damage: str) -> None:
        import shutil

        from safetensors.torch import load_file, save_file

        model = tmp_path / "damaged"
        shutil.copytree(tiny_model, model)
        file = model / "model.safetensors"
        weights = load_file(file)
        if damage == "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        elif damage == "missing":
            del weights["model.layers.0.input_layernorm.weight"]
            save_file(weights, file, {"format": "pt"})
        else:
            weights["model.norm.weight"][0] = float("nan")
            save_file(weights, file, {"format": "pt"})
        message = {"missing": "input_layernorm", "truncated": "cannot load", "nan": "not finite"}[damage]
        with pytest.raises(ConfigError, match=message):
            train(tiny_config | {"model": str(model)})

    def test_no_clipping_is_null(self, tiny_config: dict[str, Any]) -> None:
        assert train(tiny_config | {"max_grad_norm": None, "max_steps": 1, "eval_steps": None})["step"] == 1

    def test_rewards_that_would_overflow_are_failures(self, tiny_config: dict[str, Any]) -> None:
        with pytest.raises(RunStoppedError, match="1e\\+308"):
            Trainer(
                config=tiny_config | {"eval_steps": None},
                reward_funcs=lambda completions, **_: [1e308] * len(completions),
            ).train()
