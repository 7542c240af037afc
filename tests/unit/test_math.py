"""Math answers: extraction and equality in value."""

from __future__ import annotations

import pytest

from winnow.env.rewards.math import final_answer, gold_answer, grade, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("**Final Answer:** 7 ", "7"),
        ("#### 1\nso\n#### 12", "12"),
        ("<answer> 3 </answer>", "3"),
        ("Answer: **42**", "42"),
        ("**Answer: 42**.", "42."),
        ("#### **42**", "42"),
        ("\\boxed{2**3}", "2**3"),
        ("\\boxed{1}\nAnswer: 2", "2"),
        ("Answer: 2\n\\boxed{1}", "1"),
        ("Answer: $\\boxed{5}$", "5"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("the answer is 3", None),
        ("", None),
    ],
)
def test_final_answer_is_the_last_one(text, answer):
    assert final_answer(text) == answer


def test_last_boxed_balances_braces():
    assert last_boxed("\\boxed{a{b}{c{d}}}e}") == "a{b}{c{d}}"
    assert last_boxed("\\boxed{") is None


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{x + 1}", "1 + x", 1.0),
        ("\\boxed{1,234}", "1234", 1.0),
        ("\\boxed{1,2}", "12", 0.0),
        ("\\boxed{3100}", "3, 100", 0.0),
        ("\\boxed{.5}", "5", 0.0),
        ("\\boxed{35}", ".35", 0.0),
        ("\\boxed{.5}", "\\frac12", 1.0),
        ("**Answer: 42**.", "42", 1.0),
        ("\\boxed{\\text{Monday}}", "Monday", 1.0),
        ("\\boxed{(1, 2)}", "(1,2)", 1.0),
        ("\\boxed{(2, 1)}", "(1,2)", 0.0),
        ("\\boxed{}", "3", 0.0),
        ("The answer is 42.", "42", 1.0),
        ("no idea", "42", 0.0),
        ("\\boxed{43}, or is it 42", "42", 0.0),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
    ],
)
def test_equal_in_value(text, gold, right):
    assert grade(text, gold) == right


def test_reference_answer_is_looked_for_in_known_columns():
    assert gold_answer({"ground_truth": 42, "answer": "43"}) == "42"
    assert gold_answer({"answer": "so\n#### 7"}) == "7"
    assert gold_answer({"solution": "hence \\boxed{x}"}) == "x"
    assert gold_answer({"solution": "hence $\\boxed 2$."}) == "2"
    assert gold_answer({"reward_model": {"ground_truth": "1"}}) == "1"
    for row in ({}, {"answer": None}, {"answer": " "}, {"reward_model": "x"}):
        with pytest.raises(ValueError, match="reference answer"):
            gold_answer(row)


def test_boxes_that_never_close_take_no_longer_than_others() -> None:
    assert last_boxed("\\boxed{" * 200_000) is None
    assert last_boxed("\\boxed{" * 200_000 + "7}") == "7"
    assert last_boxed("\\boxed{1} and \\boxed{2 {3}} and \\boxed{4") == "2 {3}"
