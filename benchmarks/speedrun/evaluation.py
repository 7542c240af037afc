"""Evaluation of a finished run's models, in a process of its own: the same for all sides, and outside the clock.

Winnow's engine samples every held-out prompt; the noise is the same for all models. The lower bound is that of a
two-sided 95% interval over prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import read_json, write_json
from speedrun.sides import RUN, Spec, config_of

CURVE = "curve.json"


def lower_bound(rates: Sequence[float]) -> float:
    """Return the lower end of the 95% interval of the mean of the prompts' pass rates."""
    from winnow.methods.intervals import mean_interval

    low = mean_interval(rates).low
    assert low is not None, "needs three prompts"
    return low


def evaluations(spec: Spec, models: Sequence[str]) -> list[dict[str, float | None]]:
    """Return pass@1, its lower bound, and pass@8 of each model."""
    from winnow.rollout.evaluate import count_correct, evaluate
    from winnow.run.inputs import build_task
    from winnow.run.standalone import opened

    c = config_of(replace(spec, side="dapo"), "seed=0", "filter=keep_all")
    task = build_task(c.env)
    prompts = task.test[: c.eval_prompts]
    found = []
    for model in models:
        with opened(c.model_copy(update={"model": model}), task, prompts) as (_, roll_out, _, success):
            evaluation = evaluate(roll_out, prompts, n=c.eval_generations, success=success, greedy=False)
        counts = [count_correct(group, success) for group in evaluation.groups]
        low = lower_bound([right / n for n, right in counts if n])
        figures = {"pass@1": evaluation.metrics["pass@1"], "low": low, "pass@8": evaluation.metrics.get("pass@8")}
        found.append({name: None if value is None else round(value, 5) for name, value in figures.items()})
    return found


def main() -> None:
    directory = Path(sys.argv[1])
    run = read_json(directory / RUN)
    spec = Spec(**{each.name: run[each.name] for each in fields(Spec)})
    start = {"seconds": 0.0, "step": 0, "model": spec.model}
    points: list[dict[str, Any]] = [start, *run["points"]]
    curve = evaluations(spec, [point.pop("model") for point in points])
    write_json(directory / CURVE, [point | figures for point, figures in zip(points, curve, strict=True)])


if __name__ == "__main__":
    main()
