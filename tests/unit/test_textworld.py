"""Task `textworld`: real games, made by TextWorld's generator and played in real worker processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.env.base import Demonstrator, ModelTurn, OverlappingEnv, Task
from winnow.study.warm_start import word_tokenizer
from winnow.tasks.games.react import NOTHING, worded
from winnow.tasks.games.textworld.play import TextWorldEnv, readable, spelled_as_in, understood
from winnow.tasks.games.textworld.task import TextWorldConfig

from ..parity import parity_reward

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow  # games are compiled, which takes seconds

TERSE = {"theme": "basic", "only_last_action": True}
CONFIG = TextWorldConfig(
    "treasure_hunter", {"level": 12}, TERSE, train_size=2, test_size=1, max_turns=12, style="words", workers=2
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WINNOW_CACHE", str(folder))
        yield folder / "textworld"


@pytest.fixture(scope="module")
def task(cache):
    return CONFIG.build()


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


def walk(task, noise_free=True):
    """A demonstration of the first training prompt."""
    shown = (w for p, w in task.demonstrations(0) if p == task.train[0].text)
    return min(islice(shown, 20), key=len) if noise_free else next(shown)


def test_games_are_seeded_kept_and_disjoint(task, cache):
    assert isinstance(task, Task)
    assert isinstance(task, Demonstrator)
    assert len(task.train) == 2
    assert len({p.text for p in (*task.train, *task.test)}) == 3
    before = files(cache)
    assert sorted({Path(name).name for name in before if name.startswith("made")}) == ["game.json", "game.z8"]
    again = CONFIG.build()
    assert (again.train, again.test, again.fingerprint()) == (task.train, task.test, task.fingerprint())
    assert files(cache) == before


def test_fingerprint_follows_what_decides_prompts_and_rewards(task):
    same = (replace(CONFIG, workers=1), replace(CONFIG, timeout_s=5.0))
    others = (replace(CONFIG, max_turns=3), replace(CONFIG, style="react"), replace(CONFIG, train_size=1))
    assert {c.build().fingerprint() for c in same} == {task.fingerprint()}
    assert task.fingerprint() not in {c.build().fingerprint() for c in others}


def test_reward_functions_that_no_game_would_ask_are_refused(task, tiny_config):
    config = {key: value for key, value in tiny_config.items() if key != "env"}
    with pytest.raises(ConfigError, match="reward_funcs: parity_reward would never be asked: the environment gives"):
        Trainer(config=config, env=task, reward_funcs=parity_reward)


def test_damaged_files_are_made_again_as_they_were(task, cache):
    made = next((cache / "made").rglob("game.z8"))
    card = next((cache / "cards").glob("*.json"))
    facts = made.with_suffix(".json").read_bytes()
    made.write_bytes(made.read_bytes()[:1000])
    card.write_text('{"path": ')
    assert CONFIG.build().train == task.train
    assert made.stat().st_size > 100_000
    assert made.with_suffix(".json").read_bytes() == facts
    assert json.loads(card.read_text())["first"]


def test_demonstrations_may_be_of_the_first_games_alone(task):
    few = replace(CONFIG, demo_size=1).build()
    assert {prompt for prompt, _ in islice(few.demonstrations(3), 40)} == {task.train[0].text}
    assert few.fingerprint() == task.fingerprint()


def test_demonstrations_win_in_the_environment_and_are_in_the_vocabulary(task):
    words = set(task.vocabulary())
    pairs = list(islice(task.demonstrations(3), 40))
    assert pairs == list(islice(task.demonstrations(3), 40))
    for prompt, turns in pairs:
        assert prompt in {p.text for p in task.train}
        assert len(turns) % 2
        assert len(turns) < 2 * CONFIG.max_turns
        assert {word for text in (prompt, *turns) for word in text.split()} <= words
    assert len({tuple(turns) for _, turns in pairs}) > 2  # chance has its say
    assert {w for p in task.test for w in p.text.split()} <= words
    word_tokenizer(task.vocabulary(), 512).encode(task.test[0].text)
    for noise_free in (True, False):
        turns = walk(task, noise_free)
        results = play(task, task.train[0], turns[::2])
        assert [r.observation for r in results[:-1]] == turns[1::2]
        if results[-1].done:
            assert (results[-1].reward, results[-2].reward) == (1.0, 0.0)
        else:
            assert len(results) == CONFIG.max_turns
    assert play(task, task.train[0], walk(task)[::2])[-1].done


def test_what_is_no_command_of_the_game_does_nothing_and_costs_a_step(task):
    nothing = worded(NOTHING)
    bad = ["restart", "undo", "quit", "save", "tw-print walkthrough", "look. look", "look then look", "", "\x00", "é"]
    results = play(task, task.train[0], [*bad, "look " * 40, "look"])
    assert [r.observation for r in results[:-1]] == [nothing] * 11
    assert results[-1].observation != nothing
    assert results[-1].observation.strip() in task.train[0].text
    assert not any(r.done or r.reward for r in results)
    assert results[0].action == "restart"
    ended = play(task, task.train[0], ["look ;", ModelTurn("look ;", "stop", ";")])
    assert [r.observation == nothing for r in ended] == [True, False], "a stop string ends a command, it is none"
    foul = walk(task)[::2]
    foul.insert(1, "restart")
    assert play(task, task.train[0], foul)[-1].reward == 1.0


def test_a_command_that_is_none_tells_progress_too():
    env = TextWorldEnv({"max_score": 3, "verbs": [], "spelled": []}, "react", "score")
    assert env.step("I am lost").info == {"progress": 0.0}


def test_siblings_share_a_game_but_not_its_state(task):
    commands = walk(task)[::2]
    first, second = task.make_env(task.train[0]), task.make_env(task.train[0])
    for env in (first, second):
        env.start_reset().result(60)
    alone = play(task, task.train[0], commands)
    told = []
    for command in commands:
        told.append(first.start_step(command).result(60))
        assert second.start_step("look").result(60).observation.strip() in task.train[0].text
    assert told == alone
    first.close()
    second.close()


def test_react_and_score(task):
    config = replace(CONFIG, style="react", reward="score")
    react = config.build()
    rules, shown = react.train[0].messages
    assert "- take <object> from <container>" in rules["content"]
    assert worded(shown["content"]).strip() == task.train[0].text
    commands = walk(task)[::2]
    said = [f"Thought: on.\nAction: {c.upper()}." for c in commands]
    results = play(react, react.train[0], ["I am lost", *said])
    assert results[0].observation == NOTHING
    assert results[0].action == ""
    assert [r.action for r in results[1:]] == commands
    assert (results[-1].done, results[-1].reward) == (True, 1.0)
    with pytest.raises(ValueError, match="only style: words"):
        next(react.demonstrations(0))


def test_a_directory_of_games(task, cache, tmp_path):
    games = sorted((cache / "made").rglob("game.z8"))
    for part, game in zip(("train", "train", "test"), games, strict=True):
        folder = tmp_path / part / game.parent.name
        shutil.copytree(game.parent, folder)
    config = TextWorldConfig(games=str(tmp_path), style="words")
    split = config.build()
    assert (len(split.train), len(split.test)) == (2, 1)
    assert {p.text for p in (*split.train, *split.test)} == {p.text for p in (*task.train, *task.test)}
    assert config.build().fingerprint() == split.fingerprint()
    (tmp_path / "train").rename(tmp_path / "some")
    shared = replace(config, test_size=1).build()
    assert (len(shared.train), len(shared.test)) == (2, 1)
    assert not {p.text for p in shared.train} & {p.text for p in shared.test}
    with pytest.raises(ValueError, match="no training games"):
        replace(config, test_size=3).build()
    next(tmp_path.rglob("game.json")).unlink()
    with pytest.raises(ValueError, match=r"no game\.json \(of tw-make\) in its directory"):
        config.build()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.ulx").touch()
    with pytest.raises(ValueError, match="Glulx"):
        TextWorldConfig(games=str(tmp_path / "old")).build()


def test_a_game_cannot_be_in_both_folders(task, cache, tmp_path):
    game = next((cache / "made").rglob("game.z8")).parent
    for part in ("train", "test"):
        shutil.copytree(game, tmp_path / part)
    with pytest.raises(ValueError, match=r"test/game\.z8 is a training game too"):
        TextWorldConfig(games=str(tmp_path)).build()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"options": {"levl": 3}}, "treasure_hunter has no option 'levl'. Did you mean 'level'?"),
        ({"challenge": "cooking", "options": {"go": 2}}, "options of cooking: argument --go: invalid choice"),
        ({"grammar": {"them": "basic"}}, "unknown key 'them' in grammar. Did you mean 'theme'?"),
        ({"challenge": "custom", "options": {"rooms": 2}}, "unknown key 'rooms' in options"),
    ],
)
def test_unknown_options_are_refused(values, message):
    with pytest.raises(ValueError, match="textworld: ") as error:
        TextWorldConfig(**values, train_size=1, test_size=0).build()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "values", [{"train_size": 0}, {"demo_noise": 1.5}, {"demo_size": 0}, {"games": "x", "options": {"level": 1}}]
)
def test_values_are_checked(values):
    with pytest.raises(ValueError, match="TextWorldConfig"):
        TextWorldConfig(**values)


def test_text_of_games():
    raw = "\n\n  $$$ \n $$  \n\nWin!\n\n-= Den =-\nA  den.\n\n\n> -= Den =-0/1\n *** The End ***\n\nYou scored"
    assert readable(raw) == "Win!\n-= Den =-\nA  den."
    assert worded(readable(raw)) == " win ! a den . > "
    assert worded("A den.", {"den", "."}) == " <unk> den . > "
    card = {"verbs": ["open", "take"], "spelled": ["king-size bed", "x-box"], "max_score": 1}
    assert spelled_as_in(card, "open x - box") == "open x-box"
    assert understood(card, "open king-size bed")
    assert understood(card, "n")
    assert not understood(card, "close x-box")
    assert TextWorldEnv(card, "words", "won").step("close x-box").observation == " nothing happens . > "


def test_what_plays_imports_little():
    code = "import sys, winnow.tasks.games.textworld.play, winnow.env.workers.remote; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "textworld", "transformers", "jericho"} & set(loaded)


@pytest.mark.slow
def test_a_game_is_made_below_a_folder_whose_name_is_not_ascii(tmp_path):
    """Inform 7 itself can neither be there nor write there."""
    from winnow.tasks.games.textworld.games import digest_of

    games = []
    for folder in ("plain", "Spiele für 模型"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WINNOW_CACHE", str(tmp_path / folder))
            replace(CONFIG, train_size=2, test_size=1).build()
        games.append(sorted(digest_of(game) for game in (tmp_path / folder).rglob("game.z8")))
    assert len(games[0]) == 3
    assert games[0] == games[1]
