"""What a model says in ReAct's form, and what is made of it."""

from __future__ import annotations

import pytest

from winnow.tasks.games.react import normal_form, parse_action, system_prompt, words


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("Thought: a door. Action: go east", "go east"),
        ("Thought: a door.\nAction: Go   East.", "go east"),
        ("Action: go east\nAction: go west", "go west"),
        ("Action: take mug 1 from shelf 2\nObservation: you take it", "take mug 1 from shelf 2"),
        ("**Action:** `go east`", "go east"),
        ("**Action**: go east", "go east"),
        ('ACTION : "open fridge 1".', "open fridge 1"),
        ("Action: [open the box.]", "open the box"),
        ("Action:\n  go east\nand then rest", "go east"),
        ("Action: <go east>", "go east"),
        ("Action: put o'brien's key_2 in box", "put o'brien's key_2 in box"),
        ("go east", None),
        ("Thought: no action", None),
        ("Reaction: go east", None),
        ("Action:", None),
        ("Action: go east\nAction: ...", None),
        ("Action: ``", None),
        ("", None),
    ],
)
def test_parse_action(said, action):
    assert parse_action(said) == action


def test_normal_form_is_stable():
    for command in ("  Go  EAST. ", "`look`", "'[inventory]'..", ""):
        assert normal_form(normal_form(command)) == normal_form(command)
    assert normal_form("'[Inventory]'..") == "inventory"


def test_system_prompt_holds_rules_actions_and_an_example_that_parses():
    prompt = system_prompt(
        "You play.", ["look", "go <direction>"], [("A room.", "A door!", "go east"), ("A hall.", "", "look")]
    )
    assert prompt.startswith("You play.")
    assert "- look\n- go <direction>\n" in prompt
    assert "Observation: A room.\nThought: A door!\nAction: go east\n\nObservation: A hall." in prompt
    assert parse_action(prompt) == "look"


def test_words():
    assert words("You see: a Key,\nand o'clock!\n") == "you see : a key , and o ' clock !"
    assert words(words("A-b. C")) == words("A-b. C") == "a - b . c"
    assert words(" \n") == ""
