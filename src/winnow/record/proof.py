"""The proof of a ledger: totals by fate, and the check that everything dispatched came back exactly once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..base.files import from_json
from ..base.sanitize import visible
from ..types import Fate
from .costs import costs_of, seconds_table, tokens_table
from .ledger_file import first_few
from .rule_audits import RuleAudits, rules_of, rules_table

FATES = tuple(fate.value for fate in Fate)
COLUMNS = ("visits", "rollouts", "prompt_tokens", "tokens", "seconds")
HEAD = ("fate", "visits", "rollouts", "prompt tokens", "tokens", "seconds", "of tokens")
FAILURES = (
    "SELECT r.reason, v.prompt_id, COUNT(*) FROM rollouts r JOIN visits v ON v.visit = r.visit AND v.void = 0"
    " WHERE r.fate = 'failed' AND r.void = 0 GROUP BY r.reason, v.prompt_id ORDER BY MIN(r.row)"
)
"""Reason, prompt and count of failed rollouts."""
SAMPLED = (*FATES, "unrewarded", "abandoned")
"""Rows of `Ledger.totals` that hold all tokens sampled for training."""
OF_STEPS = """SELECT CAST(SUM(json_extract(metrics, '$."tokens/' || ? || '"')) AS INTEGER) FROM steps WHERE void = 0"""
"""Tokens that steps counted under a name that is no fate."""
PROBE = "probe"
"""Rollouts that compare engine and learner: a row of the totals, and a key of the meta table."""
LONGEST_GAP = 10
"""Gaps of this many epochs or more are counted together."""
BY_GAP = f"""
    SELECT MIN(epoch - previous_epoch, {LONGEST_GAP}), COUNT(*), SUM(kind <> 'none') FROM (
      SELECT v.epoch, LAG(v.epoch) OVER prompt AS previous_epoch,
             o.zero_variance AS kind, LAG(o.zero_variance) OVER prompt AS previous_kind
      FROM visits v JOIN outcomes o ON o.visit = v.visit AND o.void = 0
      WHERE v.void = 0 AND o.fate <> 'cut' AND o.zero_variance IN ('none', 'easy', 'hard', 'unknown')
      WINDOW prompt AS (PARTITION BY v.ordinal ORDER BY v.visit))
    WHERE previous_kind <> 'none' GROUP BY 1 ORDER BY 1"""
"""Epochs since a visit with zero variance, visits with that gap, and how many of them have zero variance again.

GRESO's assumption (Zheng et al. 2025, section 3.3, figure 4a). The paper asks for zero variance in any earlier epoch.
Here successive visits are compared, because a selector does not visit every prompt in every epoch; one that skips by
history visits the most stubborn prompts least often, so long gaps hold more of them. A group that a gate cut is no
evidence.
"""
_FURTHEST = (Fate.TRAINED, Fate.STALE, Fate.SURPLUS, Fate.FILTERED, Fate.CUT, Fate.PRUNED, Fate.FAILED)


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a verification. `totals` is `Ledger.totals()`; `problems` is empty if and only if `ok`."""

    ok: bool
    problems: list[str]
    totals: dict[str, dict[str, float]]
    visits: int
    rollouts: int
    steps: int
    in_flight: int
    restarts: int
    finished: bool
    rules: RuleAudits
    """Audits of the run's rules, as of its last step: estimates, not part of `ok`."""
    costs: dict[str, float]
    """Seconds by what they were spent on, and counts of tokens (`winnow.record.costs`): not part of `ok`."""


def group_fate(fates: Iterable[str]) -> str:
    """Return the fate of a visit: that of the member that got furthest; empty if one of them is unknown."""
    found = set(fates)
    if not found <= set(_FURTHEST):
        return ""
    return next(fate.value for fate in _FURTHEST if fate in found)


def totals(db: sqlite3.Connection) -> dict[str, dict[str, float]]:
    """See `Ledger.totals`."""
    table: dict[str, dict[str, float]] = {
        name: dict.fromkeys(COLUMNS, 0) for name in (*FATES, "in_flight", "void", "evaluation", PROBE)
    }
    for fate, n in db.execute("SELECT COALESCE(fate, 'in_flight'), COUNT(*) FROM visit_fates GROUP BY 1"):
        table.setdefault(fate, dict.fromkeys(COLUMNS, 0))["visits"] = n
    sums = "COUNT(*), SUM(prompt_tokens), SUM(tokens), SUM(seconds)"
    for fate, *values in db.execute(f"SELECT fate, {sums} FROM rollouts WHERE void = 0 GROUP BY fate"):
        table.setdefault(fate, dict.fromkeys(COLUMNS, 0)).update(zip(COLUMNS[1:], values, strict=True))
    void = db.execute(f"SELECT {sums} FROM rollouts WHERE void > 0").fetchone()
    table["void"].update(zip(COLUMNS[1:], (v or 0 for v in void), strict=True))
    table["void"]["visits"] = db.execute("SELECT COUNT(*) FROM visits WHERE void > 0").fetchone()[0]
    cost = db.execute("SELECT SUM(rollouts), SUM(tokens), SUM(seconds) FROM evaluations WHERE void = 0").fetchone()
    table["evaluation"].update(zip(("rollouts", "tokens", "seconds"), (v or 0 for v in cost), strict=True))
    table[PROBE].update(probed(db))
    for name in SAMPLED[len(FATES) :]:
        if tokens := db.execute(OF_STEPS, (name,)).fetchone()[0]:
            table[name] = dict.fromkeys(COLUMNS, 0) | {"tokens": tokens}
    if "unrewarded" in table:
        table["trained"]["tokens"] -= table["unrewarded"]["tokens"]
    return table


def sampled_tokens(totals: Mapping[str, Mapping[str, float]]) -> float:
    """Return the tokens sampled for training, of `Ledger.totals`."""
    return sum(totals[name]["tokens"] for name in SAMPLED if name in totals)


def totals_rows(table: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return cells under `HEAD`, one row a fate of `Ledger.totals`."""
    sampled = sampled_tokens(table)
    rows = []
    for name, row in table.items():
        cells = [f"{row[column]:,.0f}" for column in COLUMNS[:-1]]
        share = ""
        if name in SAMPLED and sampled:
            share = f"{row['tokens'] / sampled:.1%}"
        rows.append([name, *cells, f"{row['seconds']:,.1f}", share])
    return rows


def probed(db: sqlite3.Connection) -> dict[str, float]:
    """Return rollouts, tokens and seconds of comparisons of engine and learner."""
    types = {"rollouts": "INTEGER", "tokens": "INTEGER", "seconds": "REAL"}
    sums = ", ".join(f"CAST(json_extract(value, '$.{name}') AS {kind})" for name, kind in types.items())
    found = db.execute(f"SELECT {sums} FROM meta WHERE key = ?", (PROBE,)).fetchone()
    return dict(zip(types, found or (0, 0, 0.0), strict=True))


def verify(db: sqlite3.Connection) -> Proof:
    """Check every invariant of the ledger, from the ledger alone.

    An unfinished run may have visits in flight, and rollouts of a step that is not booked yet.
    """
    meta = dict(db.execute("SELECT key, value FROM meta"))
    finished = meta.get("finished", "false").lower() in ("true", "1")
    problems = []
    facts: dict[str, int | None] = {"finished": finished, "max_lag": None}
    max_lag = meta.get("max_lag", "")
    if max_lag.isdecimal():
        facts["max_lag"] = int(max_lag)
    elif "max_lag" in meta:
        problems.append(f"max_lag in the meta table is not a whole number: {max_lag!r}")
    db.create_function("furthest", 1, lambda members: group_fate(members.split(",")))
    for query, message in CHECKS:
        problems += first_few([message.format(*row) for row in db.execute(query, facts)], "like it")
    problems += _voids(db)
    metrics = db.execute("SELECT metrics FROM steps WHERE void = 0 ORDER BY step")
    last = db.execute("SELECT metrics FROM steps WHERE void = 0 ORDER BY step DESC LIMIT 1").fetchone()
    count = lambda query: int(db.execute(query).fetchone()[0])  # noqa: E731
    return Proof(
        ok=not problems,
        problems=problems,
        totals=totals(db),
        visits=count("SELECT COUNT(*) FROM visits WHERE void = 0"),
        rollouts=count("SELECT COUNT(*) FROM rollouts WHERE void = 0"),
        steps=count("SELECT COUNT(*) FROM steps WHERE void = 0"),
        in_flight=count("SELECT COUNT(*) FROM visit_fates WHERE fate IS NULL"),
        restarts=count("SELECT COUNT(*) FROM restarts"),
        finished=finished,
        rules={} if last is None else rules_of(from_json(last[0])),
        costs=costs_of(from_json(row[0]) for row in metrics),
    )


CHECKS = (
    (
        "SELECT visit, COUNT(*) FROM visits WHERE void = 0 GROUP BY visit HAVING COUNT(*) > 1",
        "visit {0} is booked {1} times",
    ),
    (
        "WITH n AS (SELECT visit, LAG(visit, 1, -1) OVER (ORDER BY visit) AS previous"
        " FROM (SELECT DISTINCT visit FROM visits WHERE void = 0))"
        " SELECT previous + 1, visit - 1 FROM n WHERE visit <> previous + 1",
        "visits {0} to {1} are missing",
    ),
    (
        "SELECT visit, GROUP_CONCAT(fate, ' and ') FROM outcomes WHERE void = 0 GROUP BY visit HAVING COUNT(*) > 1",
        "visit {0} has several fates: {1}",
    ),
    (
        "SELECT visit, fate FROM outcomes WHERE void = 0"
        " AND visit NOT IN (SELECT visit FROM visits WHERE void = 0) ORDER BY visit",
        "visit {0} is {1} but was never dispatched",
    ),
    (
        "SELECT visit FROM visit_fates WHERE fate IS NULL AND :finished ORDER BY visit",
        "visit {0} is still in flight in a finished run",
    ),
    (
        "SELECT v.visit, o.fate FROM visits v JOIN outcomes o ON o.visit = v.visit AND o.void = 0"
        " WHERE v.void = 0 AND v.keep = (o.fate = 'skipped') ORDER BY v.visit",
        "visit {0} is {1}, against the verdict it was booked with",
    ),
    (
        "SELECT visit, sibling, COUNT(*), SUM(fate = 'trained') FROM rollouts WHERE void = 0"
        " GROUP BY visit, sibling HAVING COUNT(*) > 1",
        "visit {0}, sibling {1} is booked {2} times, {3} times as trained",
    ),
    (
        "SELECT o.visit, o.group_size, COUNT(r.row) FROM outcomes o"
        " LEFT JOIN rollouts r ON r.visit = o.visit AND r.void = 0 WHERE o.void = 0"
        " GROUP BY o.row HAVING COUNT(r.row) <> o.group_size",
        "visit {0} has a group of {1} but {2} rollouts",
    ),
    (
        "SELECT visit, sibling, fate FROM rollouts WHERE void = 0"
        " AND visit NOT IN (SELECT visit FROM outcomes WHERE void = 0) ORDER BY visit",
        "visit {0}, sibling {1} is {2} but its visit is not finished",
    ),
    (
        "SELECT o.visit, o.fate, GROUP_CONCAT(DISTINCT r.fate) AS members FROM outcomes o"
        " JOIN rollouts r ON r.visit = o.visit AND r.void = 0 WHERE o.void = 0"
        " GROUP BY o.row HAVING o.fate <> furthest(members) ORDER BY o.visit",
        "visit {0} is {1} but its rollouts are {2}",
    ),
    (
        "SELECT visit, sibling, fate, reward FROM rollouts WHERE void = 0 AND reward IS NOT NULL"
        " AND fate IN ('failed', 'pruned') ORDER BY visit, sibling",
        "visit {0}, sibling {1} is {2} yet has a reward, {3}",
    ),
    (
        "SELECT visit, sibling FROM rollouts WHERE void = 0 AND reward IS NULL AND fate = 'trained'"
        " ORDER BY visit, sibling",
        "visit {0}, sibling {1} was trained without a reward",
    ),
    (
        "SELECT visit, sibling, reward FROM rollouts WHERE void = 0 AND reward IS NOT NULL"
        " AND (typeof(reward) NOT IN ('real', 'integer') OR ABS(reward) > 1.7976931348623157e308)"
        " ORDER BY visit, sibling",
        "visit {0}, sibling {1} has a reward that is not finite: {2}",
    ),
    (
        "SELECT visit, sibling, prompt_tokens, tokens, env_tokens, seconds FROM rollouts WHERE void = 0"
        " AND (prompt_tokens < 0 OR tokens < 0 OR env_tokens < 0 OR seconds < 0) ORDER BY visit, sibling",
        "visit {0}, sibling {1} has a negative count: {2} prompt, {3} sampled, {4} environment tokens, {5} s",
    ),
    (
        "SELECT visit, sibling, step FROM rollouts WHERE void = 0 AND fate = 'trained'"
        " AND step NOT IN (SELECT step FROM steps WHERE void = 0)"
        " AND (:finished OR step <= (SELECT COALESCE(MAX(step), -1) FROM steps WHERE void = 0))"
        " ORDER BY visit, sibling",
        "visit {0}, sibling {1} was trained in step {2}, which is not booked",
    ),
    (
        "SELECT r.visit, r.sibling, r.step, o.step FROM rollouts r JOIN outcomes o ON o.visit = r.visit AND o.void = 0"
        " WHERE r.void = 0 AND r.step <> o.step ORDER BY r.visit, r.sibling",
        "visit {0}, sibling {1} ended in step {2}, its group in step {3}",
    ),
    (
        "WITH at AS (SELECT s.step, COALESCE(s.version,"
        " (SELECT MAX(version) FROM visits v WHERE v.void = 0 AND v.step <= s.step)) AS version"
        " FROM steps s WHERE s.void = 0)"
        " SELECT r.visit, r.sibling, r.step, at.version, r.first_version, :max_lag FROM rollouts r"
        " JOIN at ON at.step = r.step WHERE r.void = 0 AND r.fate = 'trained'"
        " AND at.version - r.first_version > :max_lag ORDER BY r.visit, r.sibling",
        "visit {0}, sibling {1} was trained in step {2} at version {3} with a token of version {4}: over max_lag {5}",
    ),
)
"""Query for the rows that break an invariant, and the problem that each row is.

A rollout of the current step of an unfinished run is not booked yet. Without `max_lag` no lag is over it.
"""


def _voids(db: sqlite3.Connection) -> Iterator[str]:
    booked = {number: from_json(voided) for number, voided in db.execute("SELECT number, voided FROM restarts")}
    found: dict[int, dict[str, int]] = {number: {} for number in booked}
    for table in ("visits", "outcomes", "rollouts", "steps", "evaluations"):
        for number, rows in db.execute(f"SELECT void, COUNT(*) FROM {table} WHERE void <> 0 GROUP BY void"):
            if number not in booked:
                yield f"{rows} rows of {table} were voided by restart {number}, which is not booked"
            found.setdefault(number, {})[table] = rows
    for number, voided in booked.items():
        for table, rows in voided.items():
            if found[number].get(table, 0) != rows:
                yield f"restart {number} voided {rows:g} rows of {table}, found {found[number].get(table, 0)}"


def verdict(result: Proof) -> str:
    """Return the result as one line."""
    state = "finished" if result.finished else f"not finished, {_count(result.in_flight, 'visit')} in flight"
    counts = {"visit": result.visits, "rollout": result.rollouts, "step": result.steps, "restart": result.restarts}
    done = ", ".join(_count(n, noun) for noun, n in counts.items())
    found = "OK: exactly-once accounting holds" if result.ok else _count(len(result.problems), "problem")
    return f"{found} ({done}; {state})"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def render(result: Proof) -> RenderableType:
    """Return totals by fate, problems and verdict, for a rich console."""
    table = Table(title="What became of every visit, rollout, token and second", title_justify="left")
    for name in HEAD:
        table.add_column(name, justify="left" if name == "fate" else "right")
    for name, *cells in totals_rows(result.totals):
        if name in FATES or any(result.totals[name].values()):
            table.add_row(visible(name.replace("_", " ")), *cells, end_section=name == FATES[-1])
    problems = [Text(visible(f"- {problem}"), style="red") for problem in result.problems]
    rules = [rules_table(result.rules)] if result.rules else []
    found = seconds_table(result.costs), tokens_table(result.costs, result.totals["trained"]["tokens"])
    costs = [cells.table() for cells in found if cells is not None]
    return Lines(
        table, *costs, *rules, *problems, Text(verdict(result), style="bold green" if result.ok else "bold red")
    )
