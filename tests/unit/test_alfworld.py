"""Task `alfworld`: real games on the real engine, made here and played in real worker processes."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest

pytest.importorskip("alfworld")

from winnow.env.base import Demonstrator, ModelTurn, OverlappingEnv, Task
from winnow.env.workers.file_cache import load_json
from winnow.study.warm_start import word_tokenizer
from winnow.tasks.games.alfworld import task as games
from winnow.tasks.games.alfworld.play import AlfworldEnv, deeds, game_of
from winnow.tasks.games.alfworld.rooms import TASK_TYPES, plans_of
from winnow.tasks.games.alfworld.rooms import game_of as room_of
from winnow.tasks.games.alfworld.task import AlfworldConfig
from winnow.tasks.games.react import NOTHING, worded

CONFIG = AlfworldConfig(train_size=6, test_size=3, receptacles=4, objects=5, max_turns=20, style="words")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WINNOW_CACHE", str(folder))
        patch.setenv("ALFWORLD_DATA", str(folder))  # where the package makes a folder when it is imported
        yield folder / "alfworld"


@pytest.fixture(scope="module")
def task(cache):
    return CONFIG.build()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A user's directory in ALFWorld's layout."""
    root = tmp_path_factory.mktemp("data") / "json_2.1.1"
    for i, kind in enumerate(TASK_TYPES[:2]):
        for part in ("train", "valid_seen", "valid_unseen"):
            folder = root / part / f"{kind}-x" / f"trial_{i}"
            folder.mkdir(parents=True)
            game = room_of(kind, f"{part}/{i}", plans_of(part, kind), 3, 3)
            (folder / "game.tw-pddl").write_text(json.dumps(game))
            (folder / "traj_data.json").write_text(json.dumps({"task_type": kind}))
    return root.parent


def card_of(task, prompt):
    return load_json(task._files[prompt.id])


def files(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def play(task, prompt, commands):
    """What the environment answers, in a worker process."""
    env = task.make_env(prompt)
    assert isinstance(env, OverlappingEnv)
    assert env.start_reset().result(60) is None
    results = [env.start_step(command).result(60) for command in commands]
    env.close()
    return results


def test_the_planner_wins_a_game_of_each_task_type(task):
    assert isinstance(task, Task)
    assert [p.columns["task_type"] for p in task.train] == list(TASK_TYPES)
    for prompt in task.train:
        plan = card_of(task, prompt)["plan"]
        results = play(task, prompt, plan)
        assert [r.done for r in results] == [False] * (len(plan) - 1) + [True]
        assert [r.reward for r in results] == [0.0] * (len(plan) - 1) + [1.0]
        assert [r.action for r in results] == plan


def test_progress_is_what_has_been_done_of_the_planners_deeds(task):
    assert deeds(
        ["go to fridge 1", "take mug 2 from shelf 1", "heat mug 2 with microwave 1", "move mug 2 to cabinet 12"]
    ) == {
        "take mug": 1,
        "heat mug": 1,
        "move mug to cabinet": 1,
    }
    for prompt in task.train:
        plan = card_of(task, prompt)["plan"]
        told = [r.info["progress"] for r in play(task, prompt, ["look", "take moon 1 from sky 1", *plan])]
        assert told[:2] == [0.0, 0.0]
        assert told == sorted(told)
        assert told[-1] == 1.0
        assert len(set(told)) == len(deeds(plan)) + 1 or "two" in prompt.columns["task_type"]


@pytest.mark.slow
def test_games_are_seeded_kept_and_disjoint(task, cache, monkeypatch, tmp_path):
    before = files(cache / "cards")
    again = CONFIG.build()
    assert (again.train, again.test, again.fingerprint()) == (task.train, task.test, task.fingerprint())
    assert files(cache / "cards") == before
    seen, unseen = ({plan for kind in TASK_TYPES for plan in plans_of(s, kind)} for s in ("train", "valid_unseen"))
    assert not seen & unseen
    assert not {p.text for p in task.train} & {p.text for p in task.test}
    few = replace(CONFIG, train_size=2, test_size=1, workers=1)
    assert replace(few, split="valid_unseen").build().test[0].id != task.test[0].id
    monkeypatch.setenv("WINNOW_CACHE", str(tmp_path))
    assert few.build().train == task.train[:2]
    assert replace(few, seed=1).build().train[0].id != task.train[0].id


@pytest.mark.slow
def test_damaged_files_are_made_again_as_they_were(task, cache):
    kept = files(cache / "cards")
    cut, forged = (
        cache / "cards" / name for name in sorted(name for name in kept if load_json(cache / "cards" / name)["id"])[:2]
    )
    cut.write_text(cut.read_text()[:1000])
    forged.write_text(forged.read_text().replace("You pick up the", "You lose the"))
    assert CONFIG.build().train == task.train
    assert files(cache / "cards") == kept


def test_fingerprint_follows_what_decides_prompts_and_rewards(task):
    same = (replace(CONFIG, workers=1), replace(CONFIG, timeout_s=5.0), replace(CONFIG, demo_noise=0.5))
    others = (replace(CONFIG, max_turns=3), replace(CONFIG, style="react"), replace(CONFIG, train_size=5))
    assert {c.build().fingerprint() for c in same} == {task.fingerprint()}
    assert task.fingerprint() not in {c.build().fingerprint() for c in others}


def test_what_cannot_be_done_does_nothing_and_costs_a_step(task):
    prompt = task.train[0]
    plan = card_of(task, prompt)["plan"]
    ended = [*plan[:-1], ModelTurn(f"{plan[-1]} ;", "stop", ";")]  # a stop string ends a command, it is none
    results = play(task, prompt, ["look ;", "dance", "take moon 1 from sky 1", plan[-1], "look", *ended])
    assert [r.observation for r in results[:4]] == [worded(NOTHING)] * 4
    assert results[4].observation != worded(NOTHING)
    assert not any(r.done or r.reward for r in results[:-1])
    assert (results[-1].done, results[-1].reward) == (True, 1.0)


@pytest.mark.slow
def test_every_word_is_textworlds_own(task, data):
    """Random play against TextWorld's wrapper: what can be done, what is said, what wins. Siblings share a game."""
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld import EnvInfos
    from textworld.envs import PddlEnv

    read = AlfworldConfig(data=str(data), style="react").build()
    rng = random.Random(5)
    for prompt in read.train:
        path = next(f for f in data.rglob("train/*/*/game.tw-pddl") if prompt.columns["task_type"] in str(f))
        reference = AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True, feedback=True)))
        reference.load(str(path))
        game = game_of(read._files[prompt.id])
        for noise in (0.0, 0.7, 0.7):
            state, env, plan = reference.reset(), AlfworldEnv(game, "react"), list(game.card["plan"])
            assert env.reset() is None
            seen = state.feedback.partition("=-\n\n")[2].replace("\n\n", "\n")
            assert prompt.messages[1]["content"] == seen
            for _ in range(10 if noise else len(plan)):
                assert sorted(game.commands(env._path)) == state.admissible_commands
                command = rng.choice(state.admissible_commands) if rng.random() < noise or not plan else plan.pop(0)
                state, _, done = reference.step(command)
                result = env.step(f"Thought: so.\nAction: {command}")
                assert (result.observation, result.done) == (state.feedback, done)
                if done:
                    break
            assert noise or state.won


def test_siblings_share_a_game_but_not_its_state(task):
    prompt = task.train[1]
    plan = card_of(task, prompt)["plan"]
    alone = play(task, prompt, plan)
    first, second = task.make_env(prompt), task.make_env(prompt)
    for env in (first, second):
        env.start_reset().result(60)
    told = []
    for command in plan:
        told.append(first.start_step(command).result(60))
        assert second.start_step("inventory").result(60).observation == worded("You are not carrying anything.")
    assert told == alone
    first.close()
    second.close()


@pytest.mark.slow
def test_demonstrations_are_what_the_environment_answers_and_in_the_vocabulary(task, cache):
    assert isinstance(task, Demonstrator)
    known = set(task.vocabulary())
    pairs = list(islice(task.demonstrations(3), 60))
    assert pairs == list(islice(CONFIG.build().demonstrations(3), 60))
    won = 0
    for prompt, turns in pairs[:20]:
        source = next(p for p in task.train if p.text == prompt)
        assert len(turns) % 2
        assert {word for text in (prompt, *turns) for word in text.split()} <= known
        results = play(task, source, turns[::2])
        assert [r.observation for r in results[:-1]] == turns[1::2]
        won += results[-1].done
        assert results[-1].done or len(results) == CONFIG.max_turns
    assert won > 10
    assert len({tuple(turns) for _, turns in pairs}) > 12  # chance has its say
    tokenizer = word_tokenizer(task.vocabulary(), 512)
    for prompt in task.test:
        assert {*prompt.text.split()} <= known
        tokenizer.encode(prompt.text)
        for result in play(task, prompt, [*card_of(task, prompt)["plan"], "help"]):
            assert {*result.observation.split()} <= known
    walk = next((cache / "walks").iterdir())
    kept = walk.read_text()
    walk.write_text(kept[:50])
    next(CONFIG.build().demonstrations(0))
    assert walk.read_text() == kept


def test_react(task):
    react = replace(CONFIG, style="react").build()
    rules, shown = react.train[0].messages
    assert "- take <object> from <place>" in rules["content"]
    assert "Your task is to: " in shown["content"]
    plan = card_of(react, react.train[0])["plan"]
    results = play(react, react.train[0], ["I am lost", *(f"Thought: on.\nAction: {c.upper()}." for c in plan)])
    assert (results[0].observation, results[0].action) == (NOTHING, "")
    assert [r.action for r in results[1:]] == plan
    assert (results[-1].done, results[-1].reward) == (True, 1.0)
    with pytest.raises(ValueError, match="only style: words"):
        next(react.demonstrations(0))


@pytest.mark.slow
def test_a_directory_with_data(data, tmp_path):
    config = AlfworldConfig(data=str(data), style="words", train_size=None, split="valid_unseen")
    task = config.build()
    assert sorted(p.columns["task_type"] for p in task.train) == sorted(TASK_TYPES[:2])
    assert len(task.test) == 2
    assert play(task, task.test[0], card_of(task, task.test[0])["plan"])[-1].reward == 1.0
    moved = shutil.copytree(data, tmp_path / "copy")
    assert replace(config, data=str(moved / "json_2.1.1")).build().fingerprint() == task.fingerprint()
    assert len(replace(config, train_size=1, task_types=TASK_TYPES[:1]).build().train) == 1
    game = next(moved.rglob("train/*/*/game.tw-pddl"))
    game.write_text(json.dumps({"grammar": ""}))
    with pytest.raises(ValueError, match=r"game\.tw-pddl is no ALFWorld game: it has no 'pddl_domain'"):
        replace(config, data=str(moved)).build()
    game.write_text('{"grammar": ')
    with pytest.raises(ValueError, match=r"game\.tw-pddl is no ALFWorld game: Expecting value"):
        replace(config, data=str(moved)).build()
    game.with_name("traj_data.json").unlink()
    with pytest.raises(ValueError, match=r"no traj_data\.json \(its task_type\) in its directory"):
        replace(config, data=str(moved)).build()
    with pytest.raises(ValueError, match="has no folder 'train'"):
        AlfworldConfig(data=str(tmp_path)).build()


@pytest.mark.slow
def test_a_game_without_a_way_to_win_is_refused(data, tmp_path):
    broken = shutil.copytree(data, tmp_path / "data")
    game = next(broken.rglob("train/*/*/game.tw-pddl"))
    told = json.loads(game.read_text())
    told["pddl_problem"] = told["pddl_problem"].replace("(pickupable ", "(moveable ")
    game.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"finds no way to win .*game\.tw-pddl; remove the game"):
        AlfworldConfig(data=str(broken)).build()


@pytest.mark.parametrize(
    "values", [{"train_size": 0}, {"train_size": None}, {"demo_noise": 1.5}, {"receptacles": 1}, {"task_types": ()}]
)
def test_values_are_checked(values):
    with pytest.raises(ValueError, match="AlfworldConfig"):
        AlfworldConfig(**values)


def test_too_few_different_games_are_an_error(monkeypatch):
    monkeypatch.setattr(games, "_told", lambda card: ("put it", "away"))
    with pytest.raises(ValueError, match=r"1 different train games wanted, .* lower train_size, or raise receptacles"):
        replace(CONFIG, train_size=1, test_size=1, workers=1).build()


def test_what_plays_does_without_torch():
    code = "import sys, winnow.tasks.games.alfworld.games; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)
