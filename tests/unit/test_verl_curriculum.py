"""Winnow's curriculum inside verl, against a stand-in that calls it as verl does; `tests/peers/` has the real one."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from winnow.base.errors import ConfigError
from winnow.integrations.verl_config import run_config
from winnow.integrations.verl_curriculum import Curriculum
from winnow.integrations.verl_data import VerlRows
from winnow.record.ledger import Ledger
from winnow.record.proof import Proof
from winnow.record.records import RunDirectoryError
from winnow.record.stop_conditions import RunStoppedError
from winnow.run.checkpoint import CheckpointError
from winnow.study.report_data import read_run
from winnow.types import Fate

from ..builders.runs import metrics_of
from ..builders.verl_steps import PROMPTS, G, curriculum_of, one_step, row, rows, settings_of_verl, trajectory

SKIPPING: list[Any] = [
    "greso",
    "backoff",
    "thompson",
    "bayes",
    {"name": "greso", "p_easy": 0.2, "p_hard": 0.2, "floor": 0.05},
]


def proven(run: Path) -> tuple[Proof, dict[str, dict[str, float]], str]:
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems
        return proof, ledger.totals(), ledger.digest()


def saved(curriculum: Curriculum) -> dict[str, Any]:
    """What verl stores, as JSON carries it."""
    state: dict[str, Any] = json.loads(json.dumps(curriculum.state_dict(), allow_nan=False))
    return state


@pytest.mark.parametrize("selector", SKIPPING, ids=str)
def test_a_run_and_its_account(selector: Any, tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path, selector=selector)
    drawn = [[visit.prompt.ordinal for visit in one_step(curriculum, step)] for step in range(20)]
    assert all(len(ordinals) == PROMPTS for ordinals in drawn), "verl gets whole batches"
    proof, totals, _ = proven(tmp_path / "winnow")
    assert not proof.finished
    assert proof.in_flight == 0
    assert totals["skipped"]["visits"] > 0
    assert totals["trained"]["visits"] == 20 * PROMPTS, "verl also trains on groups with equal rewards"
    assert totals["trained"]["rollouts"] == 20 * PROMPTS * G
    assert totals["trained"]["tokens"] == 20 * PROMPTS * (3 + 4 + 5 + 6)
    lines = metrics_of(tmp_path / "winnow")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(line["updated"] == 1 and line["groups/effective"] == PROMPTS for line in lines)
    first, last = (
        sum(ordinal % 4 >= 2 for ordinals in part for ordinal in ordinals) for part in (drawn[:8], drawn[-8:])
    )
    assert last > first, "it learns which prompts teach"


def test_its_page(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path, selector="greso", log_completions=2)
    for step in range(3):
        one_step(curriculum, step)
    run = read_run(tmp_path / "winnow", max_samples=9)
    assert run.notes == []
    assert [chart["title"] for chart in run.charts] == ["Base probabilities of GRESO"]
    assert len(run.samples) == 6
    assert run.samples[0]["prompt_id"] in {prompt.id for prompt in VerlRows(rows()).train}
    assert run.config is not None
    assert run.config["selector"] == "greso"


@pytest.mark.parametrize("selector", SKIPPING, ids=str)
def test_a_resume_is_the_run_without_a_stop(selector: Any, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    curriculum = curriculum_of(whole, selector=selector, audit={"epsilon": 0.2})
    drawn = [[visit.number for visit in one_step(curriculum, step)] for step in range(14)]
    first = curriculum_of(parts, selector=selector, audit={"epsilon": 0.2})
    again = [[visit.number for visit in one_step(first, step)] for step in range(7)]
    state = saved(first)
    one_step(first, 7)
    one_step(first, 8, train=False)  # killed in the update
    first.close()
    second = curriculum_of(parts, selector=selector, audit={"epsilon": 0.2})
    second.load_state_dict(state)
    again += [[visit.number for visit in one_step(second, step)] for step in range(7, 14)]
    assert again == drawn
    assert saved(second)["selector"] == saved(curriculum)["selector"]
    proof, totals, digest = proven(parts / "winnow")
    assert digest == proven(whole / "winnow")[2]
    assert proof.restarts == 1
    assert totals["void"]["visits"] > PROMPTS
    lines = [metrics_of(run / "winnow") for run in (whole, parts)]
    assert [line["num_tokens"] for line in lines[0]] == [line["num_tokens"] for line in lines[1]]
    assert lines[1][-1]["seconds_total"] >= lines[1][6]["seconds_total"]


def test_fetches_of_other_sizes_choose_the_same(tmp_path: Path) -> None:
    """As with `data.gen_batch_size=1`, which verl's filter needs."""
    found = []
    for name, parts in (("whole", [PROMPTS]), ("single", [1] * PROMPTS)):
        curriculum = curriculum_of(tmp_path / name, selector="greso")
        for step in range(12):
            visits = []
            for n in parts:
                some = curriculum.draw(n, step)
                for visit in some:
                    curriculum.launch(visit, G)
                visits += some
            curriculum.returned(trajectory(visit, i, step) for visit in visits for i in range(G))
            curriculum.finished(0)
        curriculum.complete()
        found.append(proven(tmp_path / name / "winnow")[2])
    assert found[0] == found[1]


# ------------------------------------------------------------ fates


def test_failed_rollouts_are_never_zeros(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path, selector="greso")
    visits = curriculum.draw(3, 0)
    for visit in visits:
        curriculum.launch(visit, G)
    some = [trajectory(visits[0], i, 0, 1.0) for i in range(G - 1)]
    bad = [trajectory(visits[1], i, 0, math.nan if i == 2 else float(i % 2)) for i in range(G)]
    groups = curriculum.returned([*bad, *some])  # in any order, and nothing of the third
    assert [rollout.fate for rollout in groups[1].rollouts] == [None, None, Fate.FAILED, None]
    assert groups[1].rollouts[2].reason == "the reward is not within +-1e+30 (nan)"
    curriculum.finished(1)
    with pytest.warns(UserWarning, match=r"5 of 12 rollouts failed .*left out and never count as reward 0"):
        curriculum.complete()
    _, totals, _ = proven(tmp_path / "winnow")
    assert {fate: totals[fate]["rollouts"] for fate in ("trained", "failed")} == {"trained": 6, "failed": 6}
    with Ledger.open(tmp_path / "winnow" / "ledger.sqlite", read_only=True) as ledger:
        reasons = {reason.partition(":")[0] for reason, _, _ in ledger.failures()}
    assert reasons == {"the reward is not within +-1e+30 (nan)", "verl has no trajectory of it"}
    z_N = curriculum._methods.selector.z_N  # type: ignore[attr-defined]
    assert z_N[visits[0].prompt.ordinal] == 0.75, "three of four siblings are known"
    assert z_N[visits[2].prompt.ordinal] == 0
    line = metrics_of(tmp_path / "winnow")[0]
    assert line["rollouts/failed_share"] == 0.5
    assert line["reward"] == pytest.approx((1.0 + 2 / 3) / 2)


def test_numbers_too_large_for_statistics_are_absent(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path)
    (visit,) = curriculum.draw(1, 0)
    curriculum.launch(visit, G)
    rewards, answers = (0.0, 1e31, 0.0, 1.0), (1e200, 2.0, 10**400, 4.0)
    curriculum.returned(trajectory(visit, i, 0, rewards[i], scores={"pred": answers[i]}) for i in range(G))
    curriculum.finished(0)
    with pytest.warns(UserWarning, match=r"1 of 4 rollouts failed .*: the reward is not within \+-1e\+30 \(1e\+31\)"):
        curriculum.complete()
    (line,) = metrics_of(tmp_path / "winnow")
    assert line["rewards/pred/mean"] == 3.0
    assert line["reward"] == pytest.approx(1 / 3)


def test_what_verl_filters_and_discards(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path, selector="greso")
    visits = curriculum.draw(3, 0)
    for visit in visits:
        curriculum.launch(visit, G)
    equal, surplus, kept = visits
    curriculum.returned([trajectory(equal, i, 0, 0.0) for i in range(G)], Fate.FILTERED, "equal rewards")
    curriculum.returned([trajectory(surplus, i, 0, float(i % 2)) for i in range(G)], Fate.SURPLUS, "full")
    (more,) = curriculum.draw(1, 0)  # a refill, in the middle of the step
    curriculum.launch(more, G)
    curriculum.returned([trajectory(visit, i, 0, float(i % 2)) for visit in (kept, more) for i in range(G)])
    metrics = curriculum.finished(0)
    assert metrics["winnow/groups/rolled_out"] == 4
    assert metrics["winnow/frac_reward_zero_std"] == 0.25
    curriculum.complete()
    _, totals, _ = proven(tmp_path / "winnow")
    assert {fate: totals[fate]["visits"] for fate in ("trained", "filtered", "surplus")} == {
        "trained": 2,
        "filtered": 1,
        "surplus": 1,
    }
    z_N = curriculum._methods.selector.z_N  # type: ignore[attr-defined]
    assert z_N[equal.prompt.ordinal] == 1, "it learns from the dropped ones, too"


@pytest.mark.parametrize(
    ("rewards", "kind", "right"), [((-1.0, -1.0, -1.5, -1.5), "hard", 0), ((1.0, 1.0, 0.6, 0.6), "easy", G)]
)
def test_a_group_that_verl_drops_though_its_rewards_differ(
    rewards: tuple[float, ...], kind: str, right: int, tmp_path: Path
) -> None:
    """As with `metric=acc` and a reward that punishes long answers."""
    for name in ("greso", "backoff", "thompson", "bayes"):
        curriculum = curriculum_of(tmp_path / name, selector=name, audit={"epsilon": 0.2})
        dropped, kept = curriculum.draw(2, 0)
        for visit in (dropped, kept):
            curriculum.launch(visit, G)
        curriculum.returned([trajectory(dropped, i, 0, rewards[i]) for i in range(G)], Fate.FILTERED, "equal acc")
        curriculum.returned([trajectory(kept, i, 0, 0.0) for i in range(G)])
        curriculum.finished(0)
        selector: Any = curriculum._methods.selector
        if name in ("greso", "backoff"):
            assert selector.z_N[dropped.prompt.ordinal] == 1
        elif name == "thompson":
            counted = selector.right_N[dropped.prompt.ordinal], selector.wrong_N[dropped.prompt.ordinal]
            assert counted == (right, G - right)
        else:
            assert selector.posteriors.all_right == 1 + right
        curriculum.complete()
        assert curriculum._methods.audits.skips is not None
        assert curriculum._methods.audits.skips.whole.kept_signal == 0
        with Ledger.open(tmp_path / name / "winnow" / "ledger.sqlite", read_only=True) as ledger:
            query = "SELECT zero_variance, mean_reward FROM outcomes WHERE visit = ?"
            booked = ledger._db.execute(query, (dropped.number,)).fetchone()
        assert booked == (kind, pytest.approx(sum(rewards) / G))


def test_a_step_without_an_update(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path)
    visits = curriculum.draw(1, 0)
    curriculum.launch(visits[0], G)
    curriculum.returned(trajectory(visits[0], i, 0) for i in range(G))
    curriculum.finished(0, untrained="trainer.critic_warmup=2: verl updates no actor yet")
    curriculum.complete()
    _, totals, _ = proven(tmp_path / "winnow")
    assert totals["trained"]["rollouts"] == 0
    assert totals["filtered"]["rollouts"] == G
    assert metrics_of(tmp_path / "winnow")[0]["updated"] == 0


def test_groups_of_several_sizes(tmp_path: Path) -> None:
    """verl's own column `__rollout_n__`."""
    curriculum = curriculum_of(tmp_path, selector="bayes")
    for step in range(4):
        visits = curriculum.draw(3, step)
        for size, visit in enumerate(visits, 2):
            curriculum.launch(visit, size)
        curriculum.returned(trajectory(visit, i, step) for size, visit in enumerate(visits, 2) for i in range(size))
        curriculum.finished(0)
    curriculum.complete()
    _, totals, _ = proven(tmp_path / "winnow")
    assert totals["trained"]["rollouts"] == 4 * (2 + 3 + 4)
    assert totals["failed"]["rollouts"] == 0


def test_rollouts_of_several_outputs(tmp_path: Path) -> None:
    """An agent loop that rewrites its history returns several outputs a session."""
    curriculum = curriculum_of(tmp_path)
    (visit,) = curriculum.draw(1, 0)
    curriculum.launch(visit, 2)
    parts = [trajectory(visit, i, 0, float(i), part=part) for i in (1, 0) for part in (1, 0)]
    (group,) = curriculum.returned(parts)
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0]
    assert [segment.start for segment in group.rollouts[1].segments] == [0, 4]
    assert group.rollouts[1].rewards == {"score": 1.0, "acc": 1.0}
    curriculum.finished(0)
    curriculum.complete()
    assert proven(tmp_path / "winnow")[1]["trained"]["tokens"] == 2 * 3 + 2 * 4


def test_the_last_step_finishes_the_account(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path)
    one_step(curriculum, 0)
    (visit,) = curriculum.draw(1, 1)
    curriculum.launch(visit, G)
    curriculum.returned(trajectory(visit, i, 1) for i in range(G))
    curriculum.finished(0, last=True)
    curriculum.complete()
    assert proven(tmp_path / "winnow")[0].finished


# ------------------------------------------------------------ what is refused


def test_a_batch_without_a_reward(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path)
    with pytest.raises(RunStoppedError, match=r"step 0: no rollout of the batch has a reward; .*not within .* \(inf\)"):
        one_step(curriculum, 0, reward=lambda visit, i: math.inf)
    assert proven(tmp_path / "winnow")[1]["failed"]["rollouts"] == PROMPTS * G


def test_rollouts_that_are_missing_or_unknown(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path)
    (visit,) = curriculum.draw(1, 0)
    with pytest.raises(ValueError, match=r"verl returned rollouts of visits \[0\], which are not in flight"):
        curriculum.returned([trajectory(visit, 0, 0)])
    curriculum.launch(visit, G)
    with pytest.raises(RunStoppedError, match="1 prompts have no rollouts, but verl reports 0 failed groups"):
        curriculum.finished(0)


def test_a_checkpoint_in_the_middle_of_a_step(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path)
    with pytest.raises(RuntimeError, match="between steps only"):
        curriculum.state_dict()
    (visit,) = curriculum.draw(1, 0)
    curriculum.launch(visit, G)
    with pytest.raises(RuntimeError, match="between steps only"):
        curriculum.state_dict()


def test_a_selector_that_skips_everything(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path, selector="greso")
    for step in range(8):
        one_step(curriculum, step, reward=lambda visit, i: 0.0)
    curriculum._methods.selector.z_N[:] = 1e6  # type: ignore[attr-defined]
    with pytest.raises(RunStoppedError, match=r"step 8: the selector skipped the last 1\d,\d+ visits.*greso"):
        one_step(curriculum, 8)


def test_a_right_answer_by_a_key_that_is_missing(tmp_path: Path) -> None:
    curriculum = curriculum_of(tmp_path, success={"function": "correct"})
    with pytest.raises(ConfigError, match=r"success: function: compute_score returns no 'correct' \(acc, score\)"):
        one_step(curriculum, 0)


def test_resumes_that_cannot_go_on(tmp_path: Path) -> None:
    first = curriculum_of(tmp_path, selector="greso")
    one_step(first, 0)
    state = saved(first)
    first.close()

    def refused(error: type[Exception], message: str, given: Any = state, **settings: Any) -> None:
        data = settings.pop("data", None)
        with pytest.raises(error, match=message):
            curriculum_of(tmp_path, data, **{"selector": "greso"} | settings).load_state_dict(given)

    other = [row(n) | {"reward_model": {"ground_truth": "?"}} for n in range(12)]
    refused(RunDirectoryError, r"data\.pt: saved with other data\.train_files; go on with the same", data=other)
    refused(RunDirectoryError, r"saved with other selector \(greso, now bayes\)", selector="bayes")
    refused(RunDirectoryError, r"saved with other seed \(3, now 4\)", seed=4)
    refused(CheckpointError, r"data\.pt: not what this version saves", given={"step": 1})
    refused(CheckpointError, r"data\.pt: not what this version saves", given=state | {"step": -1})
    refused(CheckpointError, r"data\.pt: not what this version saves", given=None)
    broken = curriculum_of(tmp_path, selector="greso")
    broken.load_state_dict(state | {"selector": state["selector"] | {"z": "?"}})
    with pytest.raises(CheckpointError, match=r"data\.pt: not what this version saves \(state\.selector\.z"):
        broken.draw(1, 1)
    late = curriculum_of(tmp_path, selector="greso")
    late.load_state_dict(state)
    with pytest.raises(RunDirectoryError, match=r"verl resumes at step 4, but .* Winnow's state of step 1"):
        late.draw(1, 4)
    with pytest.raises(RunDirectoryError, match=r"already holds a run .*trainer\.resume_mode=auto"):
        curriculum_of(tmp_path, selector="greso").draw(1, 0)
    shutil.rmtree(tmp_path / "winnow")
    refused(RunDirectoryError, r"ledger\.sqlite: missing; data\.pt of verl's checkpoint continues a ledger")


def test_a_checkpoint_of_plain_verl(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"verl resumes at step 7, .*step 0 \(0: none, it was saved without"):
        curriculum_of(tmp_path).draw(1, 7)


def test_a_reward_above_one_is_reported_and_a_resume_may_set_success(tmp_path: Path) -> None:
    def reward(visit: Any, i: int) -> float:
        return 1.1 * (i % 2)

    first = curriculum_of(tmp_path, selector="thompson")
    with pytest.warns(UserWarning, match=r"success: undecided \(a reward of 1\.1, above 1\); set .*learn nothing more"):
        one_step(first, 0, reward=reward)
    one_step(first, 1, reward=reward)
    assert len((tmp_path / "winnow" / "warnings.jsonl").read_text().splitlines()) == 1
    state = saved(first)
    first.close()
    second = curriculum_of(tmp_path, selector="thompson", success={"at_least": 1.1})
    second.load_state_dict(state)
    one_step(second, 2, reward=reward)
    assert second._methods.selector.right_N.sum() > 0  # type: ignore[attr-defined]
    with pytest.raises(RunDirectoryError, match="saved with other success"):
        curriculum_of(tmp_path, selector="thompson").load_state_dict(saved(second))


def test_a_changed_reward_is_reported(tmp_path: Path) -> None:
    code = tmp_path / "score.py"
    code.write_text("def compute_score(*args):\n    return 1.0\n")

    def build() -> Curriculum:
        c = run_config(settings_of_verl(tmp_path), {"selector": "greso"})
        return Curriculum(c, VerlRows(rows()), code=[f"{code}:compute_score"])

    first = build()
    one_step(first, 0)
    state = saved(first)
    first.close()
    code.write_text("def compute_score(*args):\n    return 0.5\n")
    second = build()
    second.load_state_dict(state)
    one_step(second, 1)
    assert "code of this run has changed since step 1: score.py" in (tmp_path / "winnow" / "warnings.jsonl").read_text()
