"""Episodes of real ALFWorld games while worker processes are killed and stopped: all accounted for, none a 0."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("alfworld")

from winnow.env.base import StepResult
from winnow.env.workers.file_cache import load_json
from winnow.env.workers.remote import EnvLostError
from winnow.tasks.games.alfworld.task import AlfworldConfig

EPISODES = 100


def outcome(future: Any) -> StepResult | EnvLostError | None:
    """What a future comes to; anything but the loss of the environment is raised."""
    try:
        result: StepResult | None = future.result(timeout=60)
    except EnvLostError as error:
        return error
    return result


@pytest.mark.slow
def test_a_hundred_episodes_two_workers_killed_and_one_hung(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINNOW_CACHE", str(tmp_path))
    config = AlfworldConfig(train_size=4, test_size=0, receptacles=3, objects=3, style="words", workers=4, timeout_s=6)
    task = config.build()
    plans = {p.id: load_json(task._files[p.id])["plan"] for p in task.train}
    prompts = [task.train[i % 4] for i in range(EPISODES)]
    envs: list[Any] = []
    answers: dict[int, Any] = {}
    for i, prompt in enumerate(prompts):
        envs.append(task.make_env(prompt))
        answers[i] = envs[i].start_reset()
    lost: dict[int, str] = {}
    won: dict[int, float | None] = {}
    assert [outcome(answer) for answer in answers.values()] == [None] * EPISODES
    workers = [w._child and w._child.process for home in task._pool._homes for w in home.workers._workers]
    pids = [p.pid for p in workers if p is not None]
    assert len(pids) == 4
    blows = {1: (0, signal.SIGKILL), 2: (1, signal.SIGSTOP), 3: (2, signal.SIGKILL)}
    for turn in range(max(map(len, plans.values()))):
        if turn in blows:
            os.kill(pids[blows[turn][0]], blows[turn][1])
        living = [i for i in range(EPISODES) if i not in lost and i not in won]
        answers = {i: envs[i].start_step(plans[prompts[i].id][turn]) for i in living}
        for i, answer in answers.items():
            result = outcome(answer)
            if isinstance(result, EnvLostError):
                lost[i] = str(result)
            elif result is not None and result.done:
                won[i] = result.reward
    task._pool.close()
    assert won.keys() | lost.keys() == set(range(EPISODES)), "none without an end"
    assert not won.keys() & lost.keys()
    assert set(won.values()) == {1.0}
    assert len(won) >= EPISODES // 4, "one worker was left alone"
    assert lost
    causes = "; ".join(sorted(set(lost.values())))
    assert "6 s" in causes
    assert "died" in causes
