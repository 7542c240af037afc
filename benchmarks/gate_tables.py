"""Tables and picture of the gate's three tiers, from the run directories of `gate_claims.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import claims_figures as f
import numpy as np
import summaries as sm
from arms import fill, table
from claims_figures import Interval, Run, interval
from claims_tables import percent, text
from summaries import Figures

from winnow.record.records import GATE
from winnow.study.compare import reached_at
from winnow.study.report_data import read_lines

Tiers = list[dict[str, dict[str, Any]]]
"""Of every seed: by gate, by tier."""
GATES = {"gate": "edit distance", "progress": "progress"}


def write_figures(work: Path, arms: Sequence[str], *, out: Path | None, docs: Path | None) -> None:
    """Write what is there so far. What is not in `work` is as it was in `out`, or left out."""
    runs, warm = f.read_runs(work, arms)
    said = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    for part in ("calibration", "premise"):
        if (claim := work / f"{part}-s0" / "claim.json").exists():
            said[part] = json.loads(claim.read_text(encoding="utf-8"))
    if tiers := [json.loads(p.read_text(encoding="utf-8")) for p in sorted(work.glob("tiers-s*/claim.json"))]:
        said["tiers"] = tiers
    said["warm start"] = {seed: _plain(deployed) for seed, deployed in warm.items()}
    k = said["calibration"]["chosen"]["k"]
    new = {arm: [_summary(run, k) for run in by_seed.values()] for arm, by_seed in runs.items()}
    said["runs"] = sm.merged(said.get("runs", {}), new, arms)
    if out is not None:
        out.write_text(json.dumps(said, indent=1), encoding="utf-8")
    if docs is not None:
        found = {"gate-tier-1": tier_1(said["tiers"]), "gate-tier-2": tier_2(said["tiers"])}
        if "premise" in said:
            found["gate-premise"] = premise_table(said["premise"])
        fill(docs, found | {"gate-tier-3": tier_3(said["runs"])})
        draw(said["runs"], docs.with_name("gate-claims.png"))


def premise_table(premise: dict[str, list[dict[str, Any]]]) -> str:
    names = ("prefix_edit_distance", "action_entropy", "obs_unique_ratio", "termination_fraction")
    rows = []
    for temperature, found in premise.items():
        by = {row["signal"]: row for row in found}
        zero = found[0]["zero_variance"] / found[0]["groups"]
        rho = [f"{by[n]['spearman_rho']:+.2f}" for n in names]
        rows.append([temperature, f"{zero:.0%}", *rho, f"{by[names[0]]['auroc']:.2f}"])
    head = ["temperature", "zero-variance groups", *(f"rho of `{n}`" for n in names), f"AUROC of `{names[0]}`"]
    return table(head, rows)


def tier_1(tiers: Tiers) -> str:
    def column(gate: str) -> list[str]:
        found = [t[gate]["tier1"] for t in tiers]
        cut, right, groups, zero = (sum(t[key] for t in found) for key in ("cut", "right", "groups", "zero_variance"))

        def of(key: str, part: str = "share") -> str:
            return percent(interval([t[key][part] if part else t[key] for t in found]))

        return [
            f"{len(tiers)} x {groups // len(tiers)}",
            f"{zero / groups:.0%}",
            f"{cut / groups:.0%}",
            f"{right / max(cut, 1):.2f} ({right} of {cut})",
            of("seconds_saved", "median"),
            of("tokens_saved"),
            of("steps_saved"),
            of("random_saved"),
            of("oracle_saved"),
            of("same_actions", ""),
        ]

    head = [
        ("groups", "100"),
        ("zero-variance groups", "39%"),
        ("cut", "20%"),
        ("of them zero-variance (precision)", "0.95"),
        ("wall-clock saved", "13.25%"),
        ("sampled tokens saved", ""),
        ("environment steps saved", ""),
        ("tokens that as many random cuts save", ""),
        ("tokens that an oracle saves at the same step", ""),
        ("rollouts identical up to the gate's step", "all"),
    ]
    return table(["", "paper", *GATES.values()], [[*h, *c] for h, *c in zip(head, *map(column, GATES), strict=True)])


def tier_2(tiers: Tiers) -> str:
    def of(gate: str, key: str) -> Interval | None:
        return interval([t[gate]["tier2"][key] for t in tiers])

    rows = [
        ["update time saved", "32.2%", *(percent(of(gate, "seconds_saved")) for gate in GATES)],
        ["gradient norm, gated / baseline", "1.14", *(text(of(gate, "norm_ratio"), "{:.2f}") for gate in GATES)],
        ["predicted by dilution", "1.20 (tier 3)", *(text(of(g, "predicted_ratio"), "{:.2f}") for g in GATES)],
    ]
    return table(["", "paper", *GATES.values()], rows)


def tier_3(runs: Figures) -> str:
    base = runs["grpo"]
    rows = []
    for arm, found in runs.items():
        same = arm == "grpo"
        rows.append(
            [
                arm,
                str(len(found)),
                text(sm.over_seeds(found, sm.passed)),
                "" if same else text(sm.difference(found, base, sm.passed), "{:+.3f}"),
                text(sm.over_seeds(found, lambda r: r["deployed"]["greedy"])),
                text(sm.ratio(found, base, lambda r: r["tokens"]), "{:.2f}"),
                tokens_to_the_end_of(base, found),
                percent(sm.over_seeds(found, lambda r: r["cut_share"])),
                percent(sm.over_seeds(found, lambda r: r["zero_share"])),
                "" if same else text(sm.ratio(found, base, lambda r: r["grad_norm"]), "{:.2f}"),
                "" if same else text(sm.ratio(found, base, lambda r: r["teaching"]), "{:.2f}"),
            ]
        )
    share = sm.over_seeds(base, lambda r: r["oracle_steps"])
    rows.append(["oracle", str(len(base)), *["as grpo"] * 3, text(share, "{:.2f}"), *[""] * 5])
    head = [
        "arm",
        "seeds",
        "final pass@1",
        "difference",
        "greedy",
        "tokens",
        "tokens to the baseline's end (mean curves)",
        "groups cut",
    ]
    return table([*head, "zero-variance of the rest", "gradient norm", "predicted"], rows)


def tokens_to_the_end_of(base: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    """Where the mean curve over seeds first is at the baseline's mean end; single curves are too rough for that."""
    pairs = sm.paired(found, base)
    curves = [sm.mean_curve([pair[i] for pair in pairs]).tolist() for i in (0, 1)]
    own, others = (reached_at(sm.points(c), curves[1][-1][3], lambda p: p.tokens) for c in curves)
    return "not reached" if own is None or not others else f"{own / others:.2f}"


def cut_share(run: Run) -> float:
    """Of the groups that were rolled out."""
    asked = np.array([row["groups/rolled_out"] for row in run.rows])
    cut = np.array([_cut(row) for row in run.rows])
    return float(cut.sum() / asked.sum())


def _cut(row: dict[str, float]) -> float:
    shares = [row[key] * row[key.replace("cut_share", "asked")] for key in row if key.endswith("/cut_share")]
    return sum(shares)


def zero_of_rest(run: Run) -> float:
    """Zero-variance share of the groups that were not cut.

    What `divergence` cuts is counted as zero-variance, and what is cut at random is not judged.
    """
    judged = np.array([row["groups/judged"] for row in run.rows])
    zero = judged * [row.get("frac_reward_zero_std", 0.0) for row in run.rows]
    cut = sum(_cut(row) for row in run.rows if "gate/divergence/cut_share" in row)
    return float((zero.sum() - cut) / (judged.sum() - cut))


def _teaching(run: Run) -> float:
    """Share of a batch's groups whose advantages are not all zero."""
    return 1 - zero_of_rest(run) if "zero_variance" not in str(run.data.config["filter"]) else 1.0


def _norm(run: Run) -> float:
    return float(np.mean(f.series(run, "grad_norm")))


def oracle_steps(run: Run, k: int) -> float | None:
    """Environment steps that are left when every zero-variance group is stopped at step k; None with gates."""
    rows = [row for row in read_lines(run.data.path / GATE, []) if row["K"] == k]
    if not rows:
        return None
    steps = np.array([row["steps"] for row in rows], float)
    stopped = np.array([row["steps_k"] for row in rows], float)
    zero = np.array([row["reward_var"] == 0 for row in rows])
    return float(np.where(zero, stopped, steps).sum() / steps.sum())


def _plain(deployed: dict[str, Any]) -> dict[str, Any]:
    """Without the directory that the model was in."""
    return {key: value for key, value in deployed.items() if key != "model"}


def _summary(run: Run, k: int) -> dict[str, Any]:
    return {
        "seed": run.data.seed,
        "deployed": _plain(run.deployed),
        "tokens": run.data.tokens,
        "cut_share": cut_share(run),
        "zero_share": zero_of_rest(run),
        "teaching": _teaching(run),
        "oracle_steps": oracle_steps(run, k),
        "grad_norm": _norm(run),
        "curve": [[p.step, p.tokens, p.rollouts, round(p.passed, 5)] for p in run.data.curve],
        "cut_by_step": [round(_cut(row) / max(row["groups/rolled_out"], 1), 4) for row in run.rows],
        "zero_by_step": [round(row.get("frac_reward_zero_std", 0.0), 4) for row in run.rows],
    }


def draw(runs: Figures, path: Path) -> None:
    """Held-out success against sampled tokens, and the groups cut beside the baseline's zero-variance groups."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for arm, found in runs.items():
        _, tokens, _, passed = sm.mean_curve(found).T
        left.plot(tokens / 1e3, passed, marker="o", ms=3, label=f"{arm} (n={len(found)})")
    left.set(xlabel="sampled tokens, thousands", ylabel="held-out pass@1 (128 games)")
    left.legend(fontsize=8)
    lines = (
        ("grpo", "zero_by_step", "zero-variance groups, baseline"),
        ("gate", "cut_by_step", "cut by the gate"),
        ("gate-progress", "cut_by_step", "cut by progress"),
    )
    for arm, key, what in lines:
        shares = np.mean([run[key] for run in runs.get(arm, []) if key in run] or [[]], axis=0)
        if len(shares) >= 5:
            right.plot(np.convolve(shares, np.ones(5) / 5, "valid"), label=what)
    right.set(xlabel="step", ylabel="share of the groups (5-step mean)", ylim=(0, 1))
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
