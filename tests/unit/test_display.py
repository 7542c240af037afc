"""The live display of samplers and ranks elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from winnow.record.progress import Display

SAMPLER = {"restarts": 1.0, "groups": 4.0, "lag": 1.0, "idle": 0.25, "tokens_per_s": 12_345.0, "memory_mib": 812.4}
WAITING = {"restarts": 0.0, "groups": 0.0}


def row(*samplers: dict[str, float]) -> dict[str, float]:
    found = {f"sampler/{n}/{key}": value for n, one in enumerate(samplers) for key, value in one.items()}
    return found | {"sampler/ready": 1.0, "sampler/restarts": 1.0, "rank/0/memory_mib": 470.0}


def shown(*rows: dict[str, float], terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None)
    with Display(console, start=0, max_steps=len(rows)) as display:
        for step, metrics in enumerate(rows, 1):
            display.update(step, metrics, {"sampler/0": "10.0.0.1 (ab12cd)"})
    return out.getvalue()


def test_a_terminal_has_a_line_for_each() -> None:
    lines = [line.split() for line in shown(row(SAMPLER, WAITING), row(SAMPLER, WAITING), terminal=True).splitlines()]
    first = "sampler 0 12,345 tok/s idle 25% lag 1 812 MiB restarts 2 10.0.0.1 (ab12cd)"
    assert first.split() in lines, "restarts are those of the whole run"
    assert ["sampler", "1", "waits", "for", "a", "place"] in lines
    assert ["rank", "0", "470", "MiB"] in lines


def test_a_long_list_is_cut() -> None:
    text = shown(row(*[SAMPLER] * 40), terminal=True)
    assert "sampler 7 " in text
    assert "sampler 8 " not in text
    assert "and 33 more" in text


def test_a_line_says_how_many_work() -> None:
    assert "1 of 2 samplers" in shown(row(SAMPLER, WAITING), terminal=False)
    assert "samplers" not in shown({"reward": 1.0}, terminal=False)
