"""Build calibrations of recorded groups."""

from __future__ import annotations

from winnow.study.gate_calibration import Calibration, calibrate
from winnow.study.gate_effect import Effect, effect
from winnow.study.gate_search import Bound, Choice, Search
from winnow.study.gate_tables import Groups

from .gate_tables import T_MAX


def one_step(recorded: Groups, bound: Bound, *, or_rule: bool = False, folds: int = 5) -> Calibration:
    return calibrate(recorded, Search(bound, T_MAX, or_rule=or_rule), folds=folds)


def chosen(found: Calibration) -> Choice:
    assert found.plan.rest is not None
    return found.plan.rest


def jointly(recorded: Groups, bound: Bound, most: int, *, per_task_type: bool = False) -> Calibration:
    return calibrate(recorded, Search(bound, T_MAX, most, per_task_type=per_task_type))


def effect_of(recorded: Groups, choice: Choice) -> Effect:
    return effect(recorded, choice.cut_at(recorded), T_MAX)
