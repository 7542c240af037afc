"""A real vLLM server on this machine as sampler, started by the command of docs/server.md."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.base.token_filters import lowest_kept, penalized, relative_weights, seen
from winnow.engine import Finished, LocalEngine, ModelReference, Request, SamplingParams
from winnow.engine.server.client import Client, ServerError
from winnow.engine.server.engine import ServerEngine
from winnow.engine.server.options import ServerOptions
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.teacher_server import TeacherServer

from .. import parity
from ..builders.real_vllm_server import LONG, TEXT, RealServer, documented
from ..builders.runs import assert_clean, at_step, lags, metrics_of
from ..e2e import test_pages as pages
from ..unit.engine_models import make_model, word_tokenizer
from ..unit.learner_models import random_rows

pytest.importorskip("vllm")

WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model whose head is its embedding."""
    path = tmp_path_factory.mktemp("models") / "tied"
    make_model("qwen2-tied", **WIDE).save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One for the tests of this file that do not end it."""
    real = RealServer(tied, tmp_path_factory.mktemp("logs") / "server.log")
    yield real
    real.kill()


@pytest.fixture
def model(tied: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tied)


@pytest.fixture
def tokenizer(tied: Path) -> Any:
    return AutoTokenizer.from_pretrained(tied)


def connect(server: RealServer, model: Path, tokenizer: Any) -> ServerEngine:
    engine: ServerEngine = ServerOptions(server.url, 60.0).build(
        ModelReference(str(model), torch.device("cpu")), tokenizer
    )
    return engine


def endless(engine: ServerEngine) -> ServerEngine:
    """An engine whose sequences end at their length alone."""
    engine.facts = replace(engine.facts, eos_ids=frozenset())
    return engine


@pytest.fixture
def engine(server: RealServer, tied: Path, model: Any, tokenizer: Any) -> Iterator[ServerEngine]:
    built = connect(server, tied, tokenizer)
    built.load_weights(model.state_dict(), 0)
    yield built
    with suppress(RuntimeError):  # it may have failed, as some tests want
        built.cancel(list(built._call_of))  # what a failed test has left
    built.close()


def test_it_can_be_a_teacher(server: RealServer, engine: ServerEngine, model: Any, tokenizer: Any) -> None:
    """Its log-probabilities of whole rollouts are those of the model."""
    teacher = TeacherServer.connect(server.url, None, 60.0)
    n_tokens = engine.facts.vocab_size
    teacher.require_same_tokens(tokenizer, n_tokens)
    rows = [row for row in random_rows() if max(*row.rollout.prompt_ids, *row.rollout.token_ids) < n_tokens]
    padded = TokenDistribution(model.config.vocab_size)  # vLLM counts ids that no token has
    own = LocalLearner(model, padded, LearnerOptions()).logp(rows)
    for theirs, ours in zip(teacher.logp(rows), own, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-3)


def ask(n: int, **params: Any) -> list[Request]:
    return [
        Request(i, tuple(1 + (i // 4 * 7 + j) % 50 for j in range(3 + i // 4 * 11)), SamplingParams(**params), key=i)
        for i in range(n)
    ]


def play(engine: Any, lasting: int = 0) -> dict[Any, Finished]:
    """All that end, until as few are left as this."""
    events: list[Any] = []
    while engine.pending > lasting:
        events += engine.step()
    return {event.id: event for event in events if isinstance(event, Finished)}


def expected(model: Any, tokenizer: Any, request: Request, ended: Finished) -> np.ndarray:
    """Log-probabilities of its tokens under the model, after the request's transform, by the embedded engine's rule."""
    p, prompt, tokens = request.params, list(request.prompt_ids), ended.token_ids.tolist()
    n = LocalEngine(model, tokenizer, slots=1).sequences.facts.vocab_size
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1, :n].float()
    rows = len(tokens)
    if p.repetition_penalty != 1:
        contexts = [prompt + tokens[:i] + [prompt[0]] * (rows - i) for i in range(rows)]
        logits = penalized(logits, seen(torch.tensor(contexts), n), torch.full((rows, 1), p.repetition_penalty))
    inverse = torch.full((rows,), 1 / p.temperature)
    weights = relative_weights(logits, inverse)
    if p.top_k or p.top_p < 1 or p.min_p:
        limits = torch.full((rows,), p.top_k), torch.full((rows,), p.top_p), torch.full((rows,), p.min_p)
        weights = weights.masked_fill(weights < lowest_kept(weights, *limits), 0)
    chosen = weights.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    result: np.ndarray = (chosen / weights.sum(-1)).log().numpy()
    return result


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 10, "min_p": 0.02},
        {"repetition_penalty": 1.4},
    ],
    ids=str,
)
def test_log_probabilities_are_the_models(
    engine: ServerEngine, model: Any, tokenizer: Any, params: dict[str, Any]
) -> None:
    given = ask(12, max_tokens=12, **params)
    engine.submit(given)
    ended = play(engine)
    assert len(ended) == 12
    assert len({tuple(each.token_ids) for each in ended.values()}) > 8, "each has noise of its own"
    for request in given:
        each = ended[request.id]
        np.testing.assert_allclose(each.logp, expected(model, tokenizer, request, each), atol=2e-4)
        assert each.stop_reason in ("eos", "length")


def test_prompts_that_it_reads_in_several_steps(engine: ServerEngine, model: Any, tokenizer: Any) -> None:
    """A CPU server reads 2,048 tokens a step: the last of these prompts in two."""
    given = [
        Request(i, tuple(1 + (i * 7 + j) % 50 for j in range(900)), SamplingParams(max_tokens=4), key=i)
        for i in range(5)
    ]
    engine.submit(given)
    ended = play(engine)
    for request in given:
        each = ended[request.id]
        np.testing.assert_allclose(each.logp, expected(model, tokenizer, request, each), atol=2e-4)


def test_stop_strings(engine: ServerEngine, tokenizer: Any) -> None:
    engine.submit(ask(24, max_tokens=40, stop=("w1", "w2 w3")))
    ended = play(engine)
    stopped = [each for each in ended.values() if each.stop_reason == "stop"]
    assert stopped
    for each in stopped:
        assert re.search(r"w1|w2 w3", tokenizer.decode(each.token_ids))
        assert not re.search(r"w1\d?|w2 w3", tokenizer.decode(each.token_ids[:-1]))


@pytest.mark.parametrize("name", ["qwen2-tied", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_weights_that_change_while_sequences_run(
    server: RealServer, tied: Path, tokenizer: Any, tmp_path: Path, name: str
) -> None:
    """Each token has the version that sampled it; new prompts take nothing of the old weights, nor does the head."""
    untied = name == "qwen2"
    own, path = server, tied
    if untied:
        path = tmp_path / "untied"
        make_model(name, **WIDE).save_pretrained(path)
        tokenizer.save_pretrained(path)
        own = RealServer(path, tmp_path / "server.log")
    try:
        model = AutoModelForCausalLM.from_pretrained(path)
        engine = endless(connect(own, path, tokenizer))
        engine.load_weights(model.state_dict(), 3)
        running = ask(4, max_tokens=LONG)
        with own.held():
            engine.submit(running)
        old = copy.deepcopy(model)
        torch.manual_seed(1)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(0.1 * torch.randn_like(tensor))
        engine.load_weights(model.state_dict(), 4)  # which ends the pause
        later = [Request(("later", r.id), r.prompt_ids, r.params, r.key) for r in ask(8, max_tokens=12)]
        engine.submit(later)
        ended = play(engine, lasting=len(running))
        ended |= {each.id: each for each in engine.cancel([request.id for request in running])}
        engine.close()
    finally:
        if untied:
            own.kill()
    assert {3, 4} in [set(ended[request.id].versions) for request in running]
    for request in running:
        each = ended[request.id]
        assert np.all(np.diff(each.versions) >= 0)
        before, after = (expected(policy, tokenizer, request, each) for policy in (old, model))
        np.testing.assert_allclose(each.logp, np.where(each.versions == 3, before, after), atol=1e-3)
    for request in later:
        each = ended[request.id]
        assert set(each.versions) == {4}
        np.testing.assert_allclose(each.logp, expected(model, tokenizer, request, each), atol=2e-4)


def test_cancelled_requests_return_what_they_sampled(server: RealServer, engine: ServerEngine) -> None:
    endless(engine)
    with server.held() as client:
        engine.submit(ask(2, max_tokens=LONG))
    ended = engine.cancel([0, 1])
    assert [each.stop_reason for each in ended] == ["cancelled"] * 2
    assert any(len(each.token_ids) for each in ended)
    client.post("/resume", None, 30)
    engine.submit([replace(ask(1, max_tokens=12)[0], id=2)])
    assert list(play(engine)) == [2]


def test_an_update_that_a_killed_run_left(server: RealServer, tied: Path, model: Any, tokenizer: Any) -> None:
    """The server is paused and half loaded: the next run's weights end that."""
    client = Client(server.url)
    client.post("/pause?mode=keep", None, 30)
    client.post("/start_weight_update", None, 30)
    engine = connect(server, tied, tokenizer)
    engine.load_weights(model.state_dict(), 0)
    (request,) = ask(1, max_tokens=6)
    engine.submit([request])
    ended = play(engine)[0]
    np.testing.assert_allclose(ended.logp, expected(model, tokenizer, request, ended), atol=2e-4)
    engine.close()


def test_weights_that_cannot_be_read(engine: ServerEngine, server: RealServer, model: Any, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"none")
    with pytest.raises(ServerError, match=r"cannot read .*must see the run's directory") as caught:
        engine.load_file(str(file), 1)
    assert server.url in str(caught.value)


def test_another_model_is_refused(server: RealServer, tmp_path: Path, tokenizer: Any) -> None:
    make_model("qwen2-tied", **WIDE | {"hidden_size": 64}).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"{server.url}.*another model: its hidden_size is 128.*run's model is 64"):
        connect(server, tmp_path, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("VLLM_SERVER_DEV_MODE=1", "start it with VLLM_SERVER_DEV_MODE=1"),
        ("--enable-scale-out", "start it with --enable-scale-out"),
        ("--logprobs-mode processed_logprobs", "start it with --logprobs-mode processed_logprobs"),
        ("""--weight-transfer-config '{"backend": "winnow"}'""", "weight transfer is None; start it with"),
    ],
)
def test_a_missing_flag_is_named(tied: Path, tmp_path: Path, tokenizer: Any, without: str, message: str) -> None:
    real = RealServer(tied, tmp_path / "server.log", without)
    try:
        with pytest.raises(ConfigError, match=message):
            connect(real, tied, tokenizer)
    finally:
        real.kill()


def test_both_commands_of_the_page_have_the_same_flags() -> None:
    flags = [set(re.findall(r"--[\w-]+ [^-\s]\S*|--[\w-]+", documented(name))) for name in ("python -m", "vllm serve")]
    own = {"--model models/small", "--enforce-eager"}
    assert flags[0] - own == flags[1]


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again(
    tiny_config: dict[str, Any], wide_model: Path, tmp_path: Path
) -> None:
    """Its groups are relaunched, it gets the newest weights, and the bound holds."""
    real = RealServer(wide_model, tmp_path / "server.log")
    sync = {"name": "server", "url": real.url, "timeout_s": 90.0}
    config = tiny_config | {"model": str(wide_model), "sync": sync, "max_lag": 1, "correction": "truncate"}
    config |= {"reward_funcs": [f"{parity.__file__}:checksum_reward"], "max_steps": 6}

    def restart() -> None:
        real.kill()
        real.start()

    trainer = Trainer(config=config)
    trainer.add_callback(at_step(2, restart))
    try:
        with pytest.warns(UserWarning, match=rf"is replaced: .*{real.url}"):
            trainer.train()
        Trainer.resume(config["output_dir"], {"max_steps": 8}).train()
    finally:
        real.kill()
    run = Path(config["output_dir"])
    assert_clean(run)
    assert max(lags(run)) <= 1
    rows = [row for row in metrics_of(run) if "updated" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sum(row["sampler/restarts"] for row in rows) >= 1
    assert min(row["ess_ratio/with_gradient"] for row in rows if row["updated"]) > 0.5


def test_the_page_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty directory, with the server that the page starts."""
    monkeypatch.chdir(tmp_path)
    before, after = TEXT.split("\n## 2. The server\n")
    small = ["max_steps=20", "batch_size=16", "threads=1", "hidden_size=64", "num_heads=2", "num_layers=1"]
    assert pages.make_files(before) == ["server.yaml"]
    assert pages.run_commands(before, {"warm-start": small}) == ["warm-start"]
    real = RealServer(Path("models/small"), tmp_path / "server.log")
    Path("server.yaml").write_text(Path("server.yaml").read_text().replace("8000", str(real.port)))
    shorter = {"train": ["max_steps=3", "save_steps=1", "filter=keep_all", "threads=1"], "resume": ["max_steps=4"]}
    try:
        assert pages.run_commands(after, shorter) == ["train", "resume", "verify", "report"]
    finally:
        real.kill()
    assert_clean(Path("runs/server"))
    assert Path("server.html").exists()
    assert Path("runs/server/model").is_dir()
