"""A teacher's advantages: the gradient of the reverse KL by enumeration, what it reads, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow import ConfigError, Trainer
from winnow.config import validate
from winnow.engine.server.client import ServerError
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.rows import Row
from winnow.learner.teacher import Teacher, hinted
from winnow.learner.teacher_server import TeacherServer
from winnow.methods.correct.none import NoCorrection
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import POLICY_LOSSES, Clip, Plain
from winnow.types import Prompt, Rollout

from ..builders.tokenizers import chat_tokenizer
from ..builders.toy_models import PROMPT, SEQUENCES, V, close, flat, model_of, parameters, toy
from .learner_models import learner_of, llama, random_rows

WEIGHT = 0.7


def rows_of_all(logp: torch.Tensor, weights: torch.Tensor, advantages: torch.Tensor) -> list[Row]:
    """Every sequence once, with log-probabilities of the sampler, weighted by its chance."""
    rows = []
    for n, sequence in enumerate(SEQUENCES):
        sampled = logp[n].detach().numpy().astype(np.float32)
        ones = np.ones(2, bool)
        rollout = Rollout(n, tuple(PROMPT), np.array(sequence), ones, sampled, np.zeros(2, np.int32))
        rows.append(Row(rollout, float(advantages[n]), float(weights[n])))
    return rows


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("reward_weight", [0.0, 2.0])
def test_the_gradient_is_that_of_the_reward_less_the_divergence_from_the_teacher(
    on_policy: bool, reward_weight: float
) -> None:
    """Token by token at the states that the policy visits: the chance of a state has no gradient."""
    t = toy(on_policy)
    rewards = torch.linspace(-1, 2, len(SEQUENCES), dtype=torch.float64) ** 2
    rows = rows_of_all(t.sampler, t.sampler.sum(1).exp(), rewards)
    learner = LocalLearner(model_of(0), TokenDistribution(V), LearnerOptions())
    scorer = LocalLearner(model_of(2), TokenDistribution(V), LearnerOptions())
    scored, metrics = Teacher(scorer.logp).score(rows, [])
    loss = LossConfig(
        Plain(),
        correction=NoCorrection() if on_policy else Truncate(level="token", low=0, high=1e9),
        teacher_weight=WEIGHT,
        reward_weight=reward_weight,
    )
    for parameter in parameters():
        parameter.grad = None
    stats = learner.accumulate(scored, loss)
    ours = -flat(p.grad for p in parameters())
    first, second = t.policy_DV
    kl_first = (first.exp() * (first - t.reference_DV[0])).sum()
    kl_second = (second.exp() * (second - t.reference_DV[1])).sum(1)
    divergence = kl_first + (first.exp().detach() * kl_second).sum()
    # Truncate weighs tokens, so that states are the sampler's and actions the policy's.
    if not on_policy:
        of_sampler = t.sampler.reshape(V, V, 2)[:, 0, 0].exp()
        divergence = kl_first + (of_sampler * kl_second).sum()
        value = sum(
            (t.sampler[n].sum().exp() * rewards[n] * (t.policy[n] - t.sampler[n]).exp().sum())
            for n in range(len(SEQUENCES))
        )
    else:
        value = (t.policy.sum(1).exp() * rewards).sum()
    exact = reward_weight * value - WEIGHT * divergence
    close(ours, flat(torch.autograd.grad(exact, parameters(), retain_graph=True)))
    assert metrics["teacher/tokens"] == len(SEQUENCES) * 4
    mean_kl = float((t.policy - t.reference).detach().sum() / (2 * len(SEQUENCES)))
    assert stats.mean("teacher_kl") == pytest.approx(mean_kl, rel=1e-5)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_policy_loss_takes_advantages_of_tokens(name: str) -> None:
    """On policy all have the same gradient, so that of `plain`; pieces of a batch add up."""
    rows = [Row(r.rollout, r.advantage, r.weight) for r in random_rows()]
    own = [logp.numpy() for logp in learner_of(llama().double()).logp(rows)]
    for row, logp in zip(rows, own, strict=True):
        row.rollout.sampler_logp[row.rollout.action_mask] = logp
    teacher = learner_of(llama(hidden_size=16).double())
    found = []
    for loss in (POLICY_LOSSES[name](), Plain()):
        for tokens in (16_384, 20):
            model = llama().double()
            scored, _ = Teacher(teacher.logp).score(rows, [])
            learner_of(model, tokens=tokens).accumulate(scored, LossConfig(loss, teacher_weight=WEIGHT))
            found.append(flat(p.grad for p in model.parameters()))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=0, atol=1e-4 * float(found[0].abs().max()))


def test_rows_without_reward_learn_too() -> None:
    from winnow.learner.rows import with_gradient

    rows = random_rows(advantages=(0.0,))
    assert with_gradient(rows, LossConfig(Clip())) == []
    assert len(with_gradient(rows, LossConfig(Clip(), teacher_weight=1.0))) == len(rows)


def test_a_teacher_that_returns_nan_stops_the_update() -> None:
    def broken(rows: Any) -> list[torch.Tensor]:
        return [torch.full((int(row.rollout.action_mask.sum()),), torch.nan) for row in rows]

    with pytest.raises(FloatingPointError, match="teacher: the log-probability of sampled token 0 of a rollout is nan"):
        Teacher(broken).score(random_rows(), [])


def test_a_rollout_longer_than_the_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="teacher: has 5 positions, and a rollout with the teacher's prompt has"):
        Teacher(lambda rows: [], n_positions=5).score(random_rows(), [])


# ---------------------------------------------------------------- prompts


def test_a_hint_fills_in_columns() -> None:
    prompt = Prompt("p", 0, text="2+2=", columns={"answer": 4})
    assert hinted(prompt, "{answer} is right. {prompt}").text == "4 is right. 2+2="
    chat = Prompt("p", 0, messages=({"role": "user", "content": "2+2?"},), columns={"answer": 4})
    assert hinted(chat, "{prompt} ({answer})").messages == ({"role": "user", "content": "2+2? (4)"},)
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    in_parts = Prompt("p", 0, messages=({"role": "user", "content": parts},), columns={"answer": 4})
    assert hinted(in_parts, "{prompt} ({answer})").messages == hinted(chat, "{prompt} ({answer})").messages
    with pytest.raises(ConfigError, match=r"teacher: prompt: prompt 'p' has no column 'solution'; it has: answer"):
        hinted(prompt, "{prompt} {solution}")
    with pytest.raises(ConfigError, match="cannot be filled in"):
        hinted(prompt, "{prompt} {")


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({}, "teacher would be the policy itself"),
        ({"model": "m", "adapter": False}, "adapter: false is the policy without its adapter"),
        ({"prompt": "look: {answer}"}, r"has no \{prompt\}"),
        ({"model": "m", "timeout_s": 3.0}, "timeout_s has no effect without url"),
        ({"model": "m", "weight": 0}, "weight"),
        ({"model": "m", "wieght": 1}, "unknown key 'teacher.wieght'"),
        ({"model": "m", "reward_weight": True}, "reward_weight"),
    ],
)
def test_sections_that_say_nothing_are_refused(teacher: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate({"model": "m", "env": "countdown", "teacher": teacher})


def test_a_text_is_the_model() -> None:
    config = validate({"model": "m", "env": "countdown", "teacher": "runs/larger/model"})
    assert config.teacher is not None
    assert (config.teacher.model, config.teacher.weight, config.teacher.reward_weight) == ("runs/larger/model", 1, 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"advantage": "opob", "policy_loss": "plain"}, "advantage: opob finds a baseline of whole rollouts"),
        ({"correction": {"name": "mask", "only_negative": True}}, "uses the sign of the rollout's"),
        ({"importance_sampling_level": "sequence"}, "averages them over a rollout; use policy_loss: gspo_token"),
        ({"policy_loss": {"name": "clip", "importance_sampling_level": "sequence"}}, "averages them over a rollout"),
        ({"top_p": 0.9}, "whole distribution, and top_p: 0.9 changes it"),
        ({"teacher": {"url": "http://localhost:1"}, "temperature": 0.7}, "at temperature 1, not temperature: 0.7"),
        ({"teacher": {"adapter": False}}, "adapter: false needs lora"),
    ],
)
def test_settings_that_contradict_a_teacher_are_refused(
    tiny_config: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    config = tiny_config | {"teacher": {"prompt": "{prompt}"}} | more
    with pytest.raises(ConfigError, match=message):
        Trainer(config=config).train()


def test_another_vocabulary_is_refused(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    from ..builders.tokenizers import save_chat_model

    other = save_chat_model(tmp_path / "other")
    with pytest.raises(ConfigError, match="other has another vocabulary: token 0 is"):
        Trainer(config=tiny_config | {"teacher": str(other)}).train()


# ---------------------------------------------------------------- a server


class Answers(BaseHTTPRequestHandler):
    """What a vLLM server answers; `server.broken` says what it does wrong."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "teacher", "max_model_len": 64}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            return self.answer({"prompt": self.server.tokenizer.decode(asked["tokens"])})  # type: ignore[attr-defined]
        broken = self.server.broken  # type: ignore[attr-defined]
        if broken == "error":
            self.send_error(500, "out of memory")
            return None
        places: list[Any] = [None, *({str(token): {"logprob": -token / 10}} for token in asked["prompt"][1:])]
        if broken == "zero":
            places[-1] = {next(iter(places[-1])): {"logprob": -9999.0}}
        if broken == "others":
            places = [{"7": {"logprob": -1.0}}] * len(places)
        return self.answer({"choices": [{"prompt_logprobs": None if broken == "none" else places}]})

    def answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        http.broken, http.tokenizer = "", chat_tokenizer()  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def connected(server: Any, model: str | None = None) -> TeacherServer:
    return TeacherServer.connect(f"http://127.0.0.1:{server.server_port}/v1", model, 10.0)


def test_a_servers_log_probabilities_are_those_of_sampled_tokens(server: Any) -> None:
    rows = random_rows()
    found = connected(server).logp(rows)
    for row, logp in zip(rows, found, strict=True):
        r = row.rollout
        torch.testing.assert_close(logp, torch.tensor(-r.token_ids[r.action_mask] / 10).float())


def test_a_servers_vocabulary_is_compared(server: Any) -> None:
    tokenizer = chat_tokenizer()
    connected(server).require_same_tokens(tokenizer, len(tokenizer))
    tokenizer.decode = lambda ids: "?"
    with pytest.raises(ConfigError, match="has another vocabulary: token 0 is"):
        connected(server).require_same_tokens(tokenizer, len(tokenizer))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("error", "/v1/completions: status 500"),
        ("none", "without the log-probabilities of the tokens"),
        ("others", "without the log-probabilities of the tokens"),
    ],
)
def test_a_server_that_answers_something_else_ends_the_run(server: Any, broken: str, message: str) -> None:
    teacher = connected(server)
    server.broken = broken
    with pytest.raises(ServerError, match=message):
        teacher.logp(random_rows())


def test_a_probability_of_zero_is_no_number(server: Any) -> None:
    server.broken = "zero"
    with pytest.raises(FloatingPointError, match="is -inf"):
        Teacher(connected(server).logp).score([row for row in random_rows() if row.rollout.action_mask[-1]], [])


def test_a_server_that_is_not_there_or_has_another_model_is_refused(server: Any) -> None:
    with pytest.raises(ConfigError, match="does not serve 'other'; it has teacher"):
        connected(server, "other")
    with pytest.raises(ConfigError, match=r"no answer to /v1/models .*start the server"):
        TeacherServer.connect("http://127.0.0.1:9", None, 2.0)
    with pytest.raises(ConfigError, match="has no http:// or https://"):
        TeacherServer.connect("localhost:8000", None, 2.0)
