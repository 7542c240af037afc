"""What users of TRL write works inside TRL: data, environments, tools, rewards, saves, resumes, scripts."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl
from datasets import Dataset, DatasetDict, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from winnow.env.row_files import DataError
from winnow.integrations.trl import WinnowGRPOTrainer
from winnow.record.records import RunDirectoryError
from winnow.record.stop_conditions import RunStoppedError

from ..builders.trl_ports import ROWS, SPECIAL, Guess, Quiet, Saves, length, run, user
from ..builders.trl_runs import G, Watched, metrics, parity, proven, settings

pytestmark = pytest.mark.filterwarnings("ignore:You are using")  # TRL's own features are experimental
SLOW_FALSE, SLOW_TRUE = (pytest.param(value, marks=pytest.mark.slow) for value in (False, True))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 of two layers on bytes, with the chat template of TRL that knows tools."""
    path = tmp_path_factory.mktemp("chat")
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (importlib.resources.files(trl) / "chat_templates" / "qwen3.jinja").read_text("utf-8")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("methods", [{}, {"selector": "greso", "filter": "zero_variance", "advantage": "rloo"}])
def test_an_environment_that_owns_its_data(methods: dict[str, Any], chat_model: str, tmp_path: Path) -> None:
    trainer = run(chat_model, tmp_path / "out", environment_factory=Guess, reward_funcs=length, methods=methods)
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 3 * 2 * G
    assert [trainer._task.train[i].id for i in range(2)] == ["row-1", "row-2"]


@pytest.mark.parametrize("streamed", [SLOW_FALSE, True])
@pytest.mark.parametrize("prompted", [False, SLOW_TRUE])
def test_rows_that_name_their_environment(prompted: bool, streamed: bool, chat_model: str, tmp_path: Path) -> None:
    """`reset` is given every other column."""
    rows = [{"environment": "ab"[i % 2], "level": i} | ({"prompt": user(f"{i}")} if prompted else {}) for i in range(6)]
    data = IterableDataset.from_generator(lambda: iter(rows)) if streamed else Dataset.from_list(rows)
    Guess.seen = []
    run(chat_model, tmp_path / "out", environment_factory={"a": Guess, "b": Quiet}, train_dataset=data)
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 3 * 2 * G
    assert {row["level"] for row in Guess.seen} == set(range(6))
    assert all(set(row) == ({"level", "prompt"} if prompted else {"level"}) for row in Guess.seen)


def test_tools(chat_model: str, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": user(str(i))} for i in range(6)])
    run(chat_model, tmp_path / "out", tools=[Quiet().guess], reward_funcs=length, train_dataset=data)
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 3 * 2 * G


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("streamed", [False, SLOW_TRUE])
def test_rows(kind: str, streamed: bool, chat_model: str, tmp_path: Path) -> None:
    """Rewards get the columns that TRL would give them."""
    rows = [ROWS[kind](i) for i in range(6)]
    seen: list[dict[str, Any]] = []

    def watched(completions: list[Any], **columns: Any) -> list[float]:
        seen.append(columns)
        return length(completions)

    data = IterableDataset.from_generator(lambda: iter(rows)) if streamed else Dataset.from_list(rows)
    trainer = run(chat_model, tmp_path / "out", reward_funcs=watched, train_dataset=data, methods={"selector": "greso"})
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 3 * 2 * G
    assert len({prompt.id for prompt in trainer._task.train}) == 6
    own = {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    for columns in seen:
        assert set(columns) == own | (set(rows[0]) - {"prompt"})
        if "answer" in rows[0]:
            assert [columns["answer"][k]["a"][0] for k in (0, G)] == [int(columns["prompts"][k]) for k in (0, G)]


def test_pictures_are_refused_before_a_model_gets_them(chat_model: str, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": user(f"{i}"), "image": "x.png"} for i in range(6)])
    with pytest.raises(DataError, match="row 1: column 'image' is a part of the prompt"):
        run(chat_model, tmp_path / "out", reward_funcs=length, train_dataset=data)


@pytest.mark.parametrize("engine", [None, pytest.param("local", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reward", [None, 1.0, float("inf")])
def test_batches_that_teach_nothing_do_not_end_a_run(
    reward: float | None, engine: str | None, tiny_model: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """One prompt a batch, as by TRL's defaults, for longer than `max_skipped_steps` of Winnow's own loop."""

    def same(completions: list[str], **columns: Any) -> list[float | None]:
        return [1.0, *[reward] * (len(completions) - 1)] if reward == float("inf") else [reward] * len(completions)

    data = Dataset.from_list([{"prompt": f"{i} 2 3"} for i in range(1, 24)])
    conf = {"per_device_train_batch_size": G, "max_steps": 22, "max_completion_length": 2}
    methods = {} if engine is None else {"engine": engine}
    limit = {"max_failed_share": 1.0} if reward == float("inf") else {}
    trainer = run(
        str(tiny_model), tmp_path / "out", reward_funcs=same, train_dataset=data, conf=conf, methods=methods | limit
    )
    assert trainer.state.global_step == 22
    totals = proven(tmp_path / "out")
    assert sum(int(totals[fate]["rollouts"]) for fate in ("trained", "failed", "filtered")) == 22 * G
    assert (totals["failed"]["rollouts"] > 0) == (reward != 1.0)
    assert not any("the gradient was 0" in str(warning.message) for warning in recwarn)


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize(
    ("reward", "limit", "said"),
    [
        (1.0, {"max_skipped_steps": 3}, "3 steps had right answers and no signal"),
        (0.0, {"max_skipped_steps": 3}, "3 steps in a row had no group with a signal"),
        (None, {"max_failed_share": 0.4}, "100% of the rollouts failed.*no reward function gave a number"),
    ],
)
def test_limits_that_are_set_end_it(
    reward: float | None, limit: dict[str, Any], said: str, tiny_model: Path, tmp_path: Path
) -> None:
    data = Dataset.from_list([{"prompt": f"{i} 2 3"} for i in range(1, 7)])
    always = {"reward_funcs": lambda completions, **columns: [reward] * len(completions), "train_dataset": data}
    with pytest.raises(RunStoppedError, match=said):
        run(str(tiny_model), tmp_path / "out", **always, conf={"max_steps": 9}, methods=limit)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_grpo_in_the_form_of_trl(size: int, tiny_model: Path, tmp_path: Path) -> None:
    """`ddof: 1` and `eps: 1e-4` are TRL's own advantages; without them they are sqrt(G / (G - 1)) as large."""
    rows = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)])
    given = {"reward_funcs": parity, "train_dataset": rows, "model": str(tiny_model)}

    def batch(name: str, **methods: Any) -> torch.Tensor:
        args = settings(tmp_path / name, max_steps=1, per_device_train_batch_size=size * 2 * G, shuffle_dataset=False)
        trainer = Watched(**given, args=args, **methods)
        trainer.train()
        found: torch.Tensor = trainer.seen[0]["advantages"]
        return found

    own, trls = batch("plain"), batch("trl", advantage={"name": "grpo", "ddof": 1, "eps": 1e-4})
    assert own.abs().max() > 0.5
    torch.testing.assert_close(trls, own, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch("grpo", advantage="grpo"), own * (G / (G - 1)) ** 0.5, rtol=1e-3, atol=1e-6)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    ("conf", "saved", "trained"),
    [
        ({"gradient_accumulation_steps": 8, "per_device_train_batch_size": 1, "num_generations": 4}, [3], 24),
        ({"save_steps": 0.5, "max_steps": 4}, [2, 4], 32),
        ({"num_iterations": 2}, [3], 16),
        ({"save_steps": 3, "num_iterations": 2, "max_steps": 4}, [3, 4], 16),
        ({"steps_per_generation": 4, "per_device_train_batch_size": G, "max_steps": 1}, [1], 4),
        (
            {"steps_per_generation": 4, "per_device_train_batch_size": G, "max_steps": 6, "save_strategy": "epoch"},
            [4, 6],
            24,
        ),
        ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}, [3, 6], 48),
    ],
)
def test_saves_whenever_trl_saves(
    conf: dict[str, Any], saved: list[int], trained: int, tiny_model: Path, tmp_path: Path
) -> None:
    """And as many rollouts are booked as trained as TRL trained on."""
    data, saves = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)]), Saves()
    given = {"reward_funcs": parity, "train_dataset": data, "callbacks": [saves]}
    run(str(tiny_model), tmp_path / "out", **given, conf={"save_strategy": "steps"} | conf)
    assert saves.steps == saved
    assert proven(tmp_path / "out")["trained"]["rollouts"] == trained


def test_a_checkpoint_in_the_middle_of_a_batch(tiny_model: Path, tmp_path: Path) -> None:
    """The run that saved it goes on with its batch; a resume samples a new one from the same prompts, as TRL does."""
    data = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)])
    given = {"reward_funcs": parity, "train_dataset": data, "model": str(tiny_model), "selector": "greso"}
    conf = {"steps_per_generation": 4, "per_device_train_batch_size": G, "save_strategy": "steps", "save_steps": 3}
    WinnowGRPOTrainer(**given, args=settings(tmp_path / "out", max_steps=8, **conf)).train()
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 8 * G
    states = {
        step: json.loads((tmp_path / "out" / f"checkpoint-{step}" / "winnow.json").read_text())["loop"]
        for step in (3, 6, 8)
    }
    assert {step: (state["step"], state["selector"]["visits"]) for step, state in states.items()} == {
        3: (0, 0),
        6: (1, 4),
        8: (2, 8),
    }
    for step in (6, 8):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    again = WinnowGRPOTrainer(**given, args=settings(tmp_path / "out", max_steps=11, **conf))
    again.train(resume_from_checkpoint=True)
    totals = proven(tmp_path / "out")
    assert totals["trained"]["rollouts"] == 8 * G
    assert totals["void"]["rollouts"] == 8 * G
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2]


def test_train_once_more(tiny_model: Path, tmp_path: Path) -> None:
    """Refused at once where a run is, with what goes on there; what is advised works."""
    data = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)])
    given = {"reward_funcs": parity, "train_dataset": data}
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "per_device_train_batch_size": 2 * G}
    trainer = run(str(tiny_model), tmp_path / "out", **given, conf=saving)
    for _ in range(2):  # the same trainer, and a new one
        with pytest.raises(RunDirectoryError, match=r"go on with `train\(resume_from_checkpoint=True\)`, or choose"):
            trainer.train()
        trainer = WinnowGRPOTrainer(model=str(tiny_model), args=settings(tmp_path / "out", **saving), **given)
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2, 3, 4]
    unsaved = run(str(tiny_model), tmp_path / "unsaved", **given)
    with pytest.raises(RunDirectoryError, match=r"already holds a run \(config.json, ledger.sqlite\); choose another"):
        unsaved.train()


def test_checkpoints_of_others(tiny_model: Path, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)])
    given = {"reward_funcs": parity, "train_dataset": data, "model": str(tiny_model)}
    trl.GRPOTrainer(**given, args=settings(tmp_path / "plain", save_strategy="steps", max_steps=1)).train()
    trainer = WinnowGRPOTrainer(**given, args=settings(tmp_path / "plain", max_steps=2))
    with pytest.raises(RunDirectoryError, match=r"not saved by WinnowGRPOTrainer; start a new run from its weights"):
        trainer.train(resume_from_checkpoint=True)
    WinnowGRPOTrainer(**given, args=settings(tmp_path / "ours", save_strategy="steps", max_steps=1)).train()
    trainer = WinnowGRPOTrainer(**given, args=settings(tmp_path / "elsewhere", max_steps=2))
    with pytest.raises(RunDirectoryError, match=r"ledger.sqlite: missing; .* resume with the output_dir that has it"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-1"))


@pytest.mark.parametrize("methods", [{"advantage": "rloo"}, {"filter": {"name": "zero_variance"}}])
def test_lengths_stay_multiples(methods: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)])
    args = settings(tmp_path / "out", max_steps=1, pad_to_multiple_of=16, max_completion_length=5, num_iterations=2)
    trainer = Watched(model=str(tiny_model), reward_funcs=parity, train_dataset=data, args=args, **methods)
    trainer.train()
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old_per_token_logps"):
        assert trainer.seen[0][key].shape[1] == 16, key


@pytest.mark.slow
def test_bnpo_with_whatever_leaves_batches_whole(tiny_model: Path, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)])
    given = {"reward_funcs": parity, "train_dataset": data, "conf": {"loss_type": "bnpo"}}
    for i, methods in enumerate([{"advantage": "rloo"}, {"selector": "greso"}, {"filter": "zero_variance"}]):
        run(str(tiny_model), tmp_path / str(i), **given, methods=methods)
        assert proven(tmp_path / str(i))["trained"]["rollouts"] == 3 * 2 * G


def test_positional_arguments(tiny_model: Path, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)])
    args = settings(tmp_path / "out", max_steps=1)
    WinnowGRPOTrainer(str(tiny_model), parity, args, data, selector="greso").train()
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 4 * G
    with pytest.raises(ValueError, match="train_dataset: env brings its own prompts"):
        WinnowGRPOTrainer(str(tiny_model), parity, args, data, env="countdown")


@pytest.mark.parametrize("streaming", [False, SLOW_TRUE])
def test_the_script_of_trl_with_two_lines_changed(
    streaming: bool, chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA, evaluation and completions in the log, with TRL's default of `save_steps`."""
    pytest.importorskip("peft")
    from trl.scripts.grpo import main, make_parser

    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": user(f"{i}"), "answer": str(i)} for i in range(6)]
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = "def length(completions, **columns):\n    return [len(str(c)) % 3 for c in completions]\n"
    (tmp_path / "own_rewards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(trl, "GRPOTrainer", WinnowGRPOTrainer)
    line = f"""--model_name_or_path {chat_model} --dataset_name {data}
        --reward_funcs own_rewards.length think_format_reward --output_dir {tmp_path / "out"} --use_peft --lora_r 4
        --lora_target_modules q_proj v_proj --eval_strategy steps
        --eval_steps 1 --log_completions --gradient_accumulation_steps 8 --per_device_train_batch_size 1
        --per_device_eval_batch_size 8 --max_steps 2 --max_completion_length 8 --use_cpu --bf16 false --report_to none
        --learning_rate 1e-2 --dataset_streaming {streaming}"""
    main(*make_parser().parse_args_and_config(line.split()))
    assert proven(tmp_path / "out")["trained"]["rollouts"] == 2 * 8
    assert (tmp_path / "out" / "checkpoint-2" / "winnow.json").is_file()
    assert len(list((tmp_path / "out" / "completions").glob("*.parquet"))) >= 2


@pytest.mark.slow
def test_evaluations(tiny_model: Path, tmp_path: Path) -> None:
    """Of every form of `eval_dataset`, at the start, in between and by hand."""
    rows = [{"prompt": f"{i} 2 3", "row": i} for i in range(1, 7)]
    data = Dataset.from_list(rows)
    for i, held_out in enumerate([data, DatasetDict({"a": data}), IterableDataset.from_generator(lambda: iter(rows))]):
        conf = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": G}
        given = {"reward_funcs": parity, "train_dataset": data, "eval_dataset": held_out}
        trainer = run(str(tiny_model), tmp_path / str(i), **given, conf=conf | {"max_steps": 1})
        evaluated = [line for line in trainer.state.log_history if any("eval" in k and "reward" in k for k in line)]
        assert len(evaluated) == 2
        assert any("reward" in key for key in trainer.evaluate())
        assert proven(tmp_path / str(i))["trained"]["rollouts"] == 2 * G


def test_reward_functions_of_every_kind(chat_model: str, tmp_path: Path) -> None:
    """Asynchronous, with extra columns and metrics, the trainer's state, a reward model."""
    steps = []

    async def later(completions: list[Any], **columns: Any) -> list[float]:
        return length(completions)

    def told(
        completions: list[Any], trainer_state: Any, log_extra: Any, log_metric: Any, **columns: Any
    ) -> list[float]:
        steps.append(trainer_state.global_step)
        log_extra("kind", ["x"] * len(completions))
        log_metric("mine", 0.25)
        return length(completions)

    data = Dataset.from_list([{"prompt": user(str(i))} for i in range(6)])
    given = {"reward_funcs": [later, told], "train_dataset": data}
    trainer = run(chat_model, tmp_path / "out", **given, methods={"filter": "zero_variance"})
    assert steps[0] == 0
    assert max(steps) == 2
    assert list(trainer._logs["extra"]["kind"]) == ["x"] * 2 * G
    assert any(line.get("mine") == 0.25 for line in trainer.state.log_history)


def test_siblings_do_not_share_a_row(chat_model: str, tmp_path: Path) -> None:
    seen = []

    def takes(completions: list[Any], todo: list[list[str]], **columns: Any) -> list[float]:
        seen.extend(len(each) for each in todo)
        for each in todo:
            each.pop()
        return length(completions)

    rows = Dataset.from_list([{"prompt": user(str(i)), "todo": ["a", "b", "c"]} for i in range(2)])
    run(chat_model, tmp_path / "out", reward_funcs=takes, train_dataset=rows, methods={"advantage": "rloo"})
    assert seen == [3] * 3 * 2 * G
