"""Every task in the table keeps the protocol."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import subprocess
import sys

import pytest

from winnow.env.base import Demonstrator, Env, OverlappingEnv, Task
from winnow.env.rewards.rewarder import Rewarder
from winnow.tasks import ENVS
from winnow.types import Prompt

OPTIONS = {
    "countdown": [{"train_size": 30, "test_size": 10}, {"train_size": 30, "test_size": 10, "style": "expression"}],
    "reasoning_gym": [{"task": "gcd", "train_size": 12, "test_size": 4}],
    "dataset": [{"test_size": 3}],
    "python_tool": [{"test_size": 3}],
    "agent": [{"test_size": 3, "agent": f"{__file__}:agent"}],
    "verifiers": [{"config": {"taskset": {"id": "tests.peers.sums_env"}}}],
    "textworld": [
        {"options": {"level": 1}, "train_size": 1, "test_size": 1, "style": style} for style in ("words", "react")
    ],
    "alfworld": [{"train_size": 2, "test_size": 1, "style": style} for style in ("words", "react")],
}
EXTRAS = {"alfworld", "textworld", "verifiers"}
"""Tasks whose package is an extra of that name."""


def agent(prompt, base_url):
    """What `env: agent` is given; nothing is asked here."""


def cases():
    """Games of TextWorld are compiled, which takes seconds."""
    for name, all_options in OPTIONS.items():
        marks = pytest.mark.slow if name == "textworld" else ()
        yield from (pytest.param((name, options), marks=marks) for options in all_options)


def test_every_table_entry_is_tried():
    assert set(OPTIONS) == set(ENVS)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINNOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=cases(), ids=lambda case: f"{case[0]}-{case[1].get('style', '')}")
def config(request, tmp_path):
    name, options = request.param
    if name in EXTRAS:
        pytest.importorskip(name)
    if name == "python_tool" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if name in ("dataset", "python_tool", "agent"):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(12)))
        options = options | {"path": str(path)}
    return ENVS[name](**options)


def test_options_are_a_frozen_documented_dataclass(config):
    assert dataclasses.is_dataclass(config)
    assert type(config).__doc__
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_task_keeps_the_protocol(config):
    task = config.build()
    assert isinstance(task, Task)
    assert task.train
    assert task.max_turns >= 1
    for part in (task.train, task.test):
        assert [p.ordinal for p in part] == list(range(len(part)))
        assert len({p.id for p in part}) == len(part)
        for prompt in part:
            assert isinstance(prompt, Prompt)
            assert (prompt.text is None) != (prompt.messages is None)
            json.dumps(dict(prompt.columns))
    contents = [{json.dumps([p.text, p.messages]) for p in part} for part in (task.train, task.test)]
    assert not contents[0] & contents[1]
    env = task.make_env(task.train[0])
    assert env is None if task.max_turns == 1 else isinstance(env, Env | OverlappingEnv)
    again = config.build()
    assert again.train == task.train
    assert again.test == task.test
    assert again.fingerprint() == task.fingerprint()
    rewarder = Rewarder(task.reward_funcs)
    rewarder.check(task.train[0].columns)
    rewarder.close()
    assert pickle.loads(pickle.dumps(task.train[0])) == task.train[0]


def test_demonstrators_show_what_their_vocabulary_holds(config):
    task = config.build()
    if not isinstance(task, Demonstrator) or task.train[0].text is None:
        return
    prompt, completion = next(task.demonstrations(0))
    said = [completion] if isinstance(completion, str) else completion
    assert len(said) % 2
    assert {word for text in (prompt, *said) for word in text.split()} <= set(task.vocabulary())


def test_table_is_lazy():
    code = (
        "import sys; from winnow.tasks import ENVS; list(ENVS); print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2
    with pytest.raises(KeyError):
        ENVS["nothing"]
