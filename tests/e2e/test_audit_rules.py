"""Audits of rules in whole runs: booked, resumed exactly, shown by `winnow verify` and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.methods.gate import GATES, GateContext
from winnow.record.ledger import Ledger
from winnow.record.rule_audits import rules_of
from winnow.study.report import write_report
from winnow.types import GroupView, Token, Verdict

from ..builders.runs import assert_clean, fingerprint, resume_after_each, train
from ..builders.selectors import Unrelated
from ..gates import Fake
from ..parity import parity_reward

GRESO = {
    "env": {"name": "countdown", "train_size": 6, "test_size": 4},
    "selector": "greso",
    "num_generations": 2,
    "audit": {"epsilon": 0.3, "max_signal_loss": 0.9},
}


@dataclass(frozen=True)
class OddRule:
    """Stops odd siblings at token 3."""

    at: ClassVar[Token] = Token(3)
    needs: ClassVar[frozenset[str]] = frozenset()

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [Verdict(view.sibling is not None and view.sibling % 2 == 0, "stopped") for view in views]


class OddGate(Fake):
    def rule(self) -> OddRule:  # type: ignore[override]
        return OddRule()


@dataclass(frozen=True)
class Odd:
    def build(self, context: GateContext) -> OddGate:
        return OddGate()


@pytest.mark.slow
def test_resume_is_bit_exact_with_greso_and_a_gate_under_audit(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GATES, "stops", Odd)
    config = tiny_config | GRESO | {"gates": ["stops"], "num_generations": 4, "eval_steps": None, "max_steps": 6}
    whole = tmp_path / "whole"
    train(config | {"output_dir": str(whole)})
    assert_clean(whole)
    expected = fingerprint(whole)
    rules = rules_of(expected["metrics"][-1])
    assert set(rules) == {"greso", "stops"}
    for rule in rules.values():
        assert rule["audited"] > 0
        assert rule["precision_low"] <= rule["precision"] <= rule["precision_high"]
    assert rules["stops"]["removed"] > 0
    first = rules_of(expected["metrics"][0])["stops"]
    assert first["override_probability"] == 1.0, "nothing is removed until there is evidence"
    assert first["removed"] == 0
    part = resume_after_each(config | {"output_dir": str(tmp_path / "part")}, range(1, 6))
    assert fingerprint(part) == expected
    assert_clean(part)


def test_the_ledger_and_the_page_tell_what_the_rules_got_wrong(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    train(tiny_config | GRESO | {"max_steps": 12, "audit": {"epsilon": 0.3}})
    run = Path(tiny_config["output_dir"])
    assert_clean(run)
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        rule = ledger.verify().rules["greso"]
        visits = ledger._db.execute("SELECT keep, reason FROM visits").fetchall()
    audited = sum(bool(keep) and reason.startswith("audit: greso: ") for keep, reason in visits)
    removed = sum(not keep for keep, _ in visits)
    assert (rule["audited"], rule["removed"]) == (audited, removed)
    assert audited > 0
    assert removed > 0
    shown = CliRunner().invoke(app, ["verify", str(run)], env={"COLUMNS": "120"}).stdout
    assert "What the rules got wrong" in shown
    assert "greso" in shown
    as_json = json.loads(CliRunner().invoke(app, ["verify", str(run), "--json"]).stdout)
    assert as_json["rules"]["greso"] == rule
    page = tmp_path / "page.html"
    write_report([run], page)
    text = page.read_text()
    assert '"rules":{"head":["rule","removed","audited"' in text
    assert "audit/greso/signal_lost_high" in text


def test_an_audit_of_nothing_is_refused(tiny_config: dict[str, Any]) -> None:
    for audit, message in (
        ({"epsilon": 0.1}, "nothing to audit"),
        ({"epsilon": 0.0}, "audit.epsilon"),
        ({"max_signal_loss": 1.0}, "audit.max_signal_loss"),
        ({"epsilonn": 0.1}, "unknown key 'audit.epsilonn'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(config=tiny_config | {"audit": audit}, reward_funcs=parity_reward)


def test_a_selector_of_another_class_is_refused(tiny_config: dict[str, Any]) -> None:
    values = tiny_config | {"selector": f"{Unrelated.__module__}:Unrelated"}
    with pytest.raises(
        ConfigError, match=r"selector: .*Unrelated builds a Unrelated, not a StreamSelector; derive from"
    ):
        Trainer(config=values, reward_funcs=parity_reward)
