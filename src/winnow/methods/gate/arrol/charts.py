"""Charts of the pruning gate."""

from __future__ import annotations

from ...base import Chart

SECTION = "Pruned while generated"


def quality_charts(prefix: str) -> list[Chart]:
    """Return the charts of a gate whose metrics begin with `prefix`."""

    def chart(title: str, lines: dict[str, str], *, share: bool = False, percent: bool = False) -> Chart:
        full = {f"{prefix}/{metric}": name for metric, name in lines.items()}
        return Chart(title, full, share=share, percent=percent, section=SECTION)

    kept = {"keep_rate": "kept", "expected_keep_rate": "expected"}
    told_apart = {"auroc": "AUROC", "auroc_within": "AUROC among siblings", "accuracy": "accuracy"}
    right = {"positive_share": "of those trained", "success": "of all asked", "target": "target"}
    survivors = {"survivors/none": "none", "survivors/one": "one", "survivors/all": "all"}
    undecided = {"ended_early": "ended before it", "not_finite": "score not finite"}
    return [
        chart("Share of rollouts kept", kept, share=True, percent=True),
        chart("Right answers", right, share=True, percent=True),
        chart("Balance of trained groups, mean p (1 - p)", {"balance": "balance"}),
        chart("How well success is told apart", told_apart, share=True),
        chart("Brier score", {"brier": "mean squared error"}),
        chart("Tokens saved", {"tokens_saved": "a step, estimated"}),
        chart("Where the decision falls", {"detection_length": "token"}),
        chart("Groups by survivors", survivors),
        chart("Rollouts without a decision", undecided),
    ]
