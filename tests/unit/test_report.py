"""The report page: what it says, how it degrades, and that nothing of a run can become markup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winnow.base.sanitize import visible
from winnow.study.report import count_text, write_report
from winnow.study.report_data import columns, read_run
from winnow.study.report_samples import MAX_TEXT

from ..builders.pages import HOSTILE, Page, card, make_run, page, sample
from ..builders.runs import metrics_of


def test_page_is_one_valid_file_that_needs_no_network(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "run"))
    assert len(found.text.encode()) < 2_000_000
    assert found.tags.count("html") == found.tags.count("body") == 1
    assert not {"link", "img", "iframe", "object"} & set(found.tags)
    assert not [value for name, value in found.attributes if name in ("src", "href")]
    assert "default-src 'none'" in found.text
    assert not list(tmp_path.glob(".*.writing"))


def test_headline_figures_are_those_of_the_run(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "run"))
    assert card(found, "Held-out pass@1")["value"] == "0.160 → 0.460"
    assert card(found, "Held-out pass@1")["note"] == "2.87× the start; best 0.460"
    assert card(found, "Tokens sampled") == {
        "label": "Tokens sampled",
        "value": "80 k",  # 20 steps of 2 visits of 2 rollouts of 1,000 tokens
        "note": "50% of them in groups that were trained on",
        "state": "",
    }
    assert card(found, "Ledger")["state"] == "good"
    assert card(found, "Wall clock")["value"] == "0:00:26"


def test_tokens_by_fate_come_from_the_ledger(tmp_path: Path) -> None:
    run = page(make_run(tmp_path / "run")).data["runs"][0]
    assert run["tokens"]["trained"] == run["tokens"]["filtered"] == 40_000
    rows = {row[0]: row for row in run["totals"]["rows"]}
    assert rows["trained"] == ["trained", "20", "40", "80", "40,000", "0.4", "50.0%"]
    assert rows["evaluation"][2] == "16"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    samples = [sample(1, "trained", 1.0, prompt=HOSTILE, completion=HOSTILE, reason=HOSTILE, prompt_id=HOSTILE)]
    run = make_run(tmp_path / "<b>run</b> & co", samples=samples)
    (run / "config.json").write_text(json.dumps({HOSTILE: {"x": HOSTILE}, "nan": float("nan")}))
    plain = page(make_run(tmp_path / "plain"))
    found = page(run)
    assert found.tags == plain.tags, "the data opened or closed a tag"
    kept = found.data["runs"][0]["samples"][0]
    assert kept["completion"] == visible(HOSTILE)
    assert "</script>" in kept["completion"]
    embedded = found.text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(embedded) == found.data
    assert not set("<>&") & set(embedded)
    assert "<b>run" not in found.text.split("<body>")[0]
    assert dict(found.data["runs"][0]["config"])["nan"] == "nan"


def test_script_never_sets_markup() -> None:
    assets = Path(__file__).parents[2] / "src/winnow/study/assets"
    for name in ("report.js", "charts.js", "bars.js", "compare.js"):
        source = (assets / name).read_text()
        assert not [
            w for w in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(") if w in source
        ]


def test_visible_shows_what_would_hide_or_reorder() -> None:
    assert visible("a\x00\x1b\x9b\u202eb\ufeff\n\tc") == "a\\x00\\x1b\\x9b\\u202eb\\ufeff\n\tc"
    assert visible("\ud800") == "?"
    assert visible("نص 🙂") == "نص 🙂"


@pytest.mark.parametrize("missing", ["config.json", "metrics.jsonl", "samples.jsonl", "ledger.sqlite"])
def test_missing_piece_is_said_and_the_rest_is_shown(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path / "run")
    (run / missing).unlink()
    shown = page(run).data["runs"][0]
    assert any(note.startswith(f"{missing} is missing") for note in shown["notes"])
    assert bool(shown["metrics"]) == (missing != "metrics.jsonl")
    assert bool(shown["samples"]) == (missing != "samples.jsonl")
    assert bool(shown["proof"]) == (missing != "ledger.sqlite")
    assert bool(shown["config"]) == (missing != "config.json")


def test_without_a_ledger_tokens_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    (run / "ledger.sqlite").unlink()
    rows = metrics_of(run)
    assert page(run).data["runs"][0]["tokens"]["trained"] == pytest.approx(sum(r["tokens/trained"] for r in rows))


@pytest.mark.parametrize("damage", [b"", b"not a database" * 50, None])
def test_damaged_ledger_is_said(tmp_path: Path, damage: bytes | None) -> None:
    run = make_run(tmp_path / "run")
    path = run / "ledger.sqlite"
    path.write_bytes(path.read_bytes()[:5000] if damage is None else damage)
    shown = page(run).data["runs"][0]
    assert shown["proof"] is None
    assert any("ledger.sqlite cannot be used" in note and str(tmp_path) not in note for note in shown["notes"])


def test_torn_last_line_is_tolerated_and_other_damage_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:40])
    assert read_run(run, max_samples=8).notes == []
    assert len(read_run(run, max_samples=8).rows) == 6
    lines[2] = "\x00\x00" + lines[2]
    lines[3] = "[1, 2]"
    (run / "metrics.jsonl").write_bytes(b"\xff\n" + "\n".join(lines).encode())
    notes = read_run(run, max_samples=8).notes
    assert notes == ["metrics.jsonl: 3 lines left out that are not JSON objects, the first is line 1."]


def test_two_lines_of_a_step_are_one_row(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": s, "reward": s / 10, "seconds_total": 10 * s} for s in (1, 2, 3)]
    rows.append({"step": 3, "eval/pass@1": 0.5, "seconds_total": 35})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_run(run, max_samples=8)
    assert [(row["step"], row["reward"]) for row in read.rows] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [(row["step"], row["eval/pass@1"], row["seconds_total"]) for row in read.evaluations] == [(3, 0.5, 35)]


def test_columns_keep_means_and_the_end_of_what_grows() -> None:
    rows = [{"step": float(i), "num_tokens": 10.0 * i, "reward": float(i % 2)} for i in range(1000)]
    rows[7]["rare"] = 3.0
    few = columns(rows, 100)
    assert {key: len(values) for key, values in few.items()} == dict.fromkeys(few, 100)
    assert [few[key][0] for key in ("step", "num_tokens", "reward", "rare")] == [9, 90, 0.5, 3.0]
    assert few["step"][-1] == 999
    assert few["rare"][1] is None
    assert columns(rows[:50], 100)["reward"] == [0.0, 1.0] * 25


@pytest.mark.slow
def test_long_run_with_huge_texts_stays_under_the_limit(tmp_path: Path) -> None:
    samples = [sample(i, "trained", 1.0, completion="<&>é" * 20_000) for i in range(400)]
    run = make_run(tmp_path / "run", steps=3000, samples=samples)
    found = page(run)
    assert len(found.text.encode()) < 2_000_000
    shown = found.data["runs"][0]
    assert shown["metrics"]["step"][-1] == 3000
    assert len(shown["metrics"]["step"]) > 400, "texts make room before charts do"
    assert shown["averaged"] == {"metrics": 7, "evals": 1}
    assert shown["samples"]
    assert shown["samples"][0]["completion"].endswith(f"({80_000 - MAX_TEXT:,} more characters)")


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name / "run", steps=steps, seed=i) for i, (name, steps) in enumerate([("a", 60), ("b", 40)])
    ]
    output = tmp_path / "page.html"
    write_report(runs, output)
    data = Page(output).data
    assert [run["name"] for run in data["runs"]] == ["a/run (1)", "b/run (2)"]
    cards = [{card["label"]: card["value"] for card in run} for run in data["cards"]]
    assert [run["Tokens sampled"] for run in cards] == ["80 k", "80 k"]
    assert [run["Held-out pass@1"].split()[-1] for run in cards] == ["0.460", "0.460"]
    assert data["differences"] == {"seed": ["0", "1"]}


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    output = tmp_path / "page.html"
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], output)
    with pytest.raises(ValueError, match=r"folder: not a run directory: it has none of config.json"):
        write_report([tmp_path / "folder"], output)
    with pytest.raises(ValueError, match="there is no such folder"):
        write_report([tmp_path / "absent"], output)
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        write_report([make_run(tmp_path / "run")], tmp_path / "absent" / "page.html")
    assert not output.exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (950, "950"), (12_345, "12.3 k"), (999_700, "1 M"), (4.56e6, "4.56 M"), (7.89e9, "7.89 G")],
)
def test_count_text(count: float, text: str) -> None:
    assert count_text(count) == text


def test_the_profile_of_the_selector_is_drawn_or_its_absence_told(tmp_path: Path) -> None:
    profile = tmp_path / "p.jsonl"
    lines = [{"id": str(i), "n": 16, "correct": i % 17, "mean_reward": 0.5} for i in range(34)]
    profile.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = make_run(tmp_path / "run", steps=5)
    assert read_run(run, max_samples=8).profile is None
    config = json.loads((run / "config.json").read_text())
    for name, expected in ((str(profile), "34 prompts"), (f"{HOSTILE[:9]}/gone.jsonl", "no such profile")):
        config["selector"] = {"name": "pass_rate", "profile": name}
        (run / "config.json").write_text(json.dumps(config))
        write_report([run], tmp_path / "page.html")
        page = Page(tmp_path / "page.html")
        found = page.data["runs"][0]["profile"]
        assert expected in found.get("caption", found.get("note"))
        if "counts" in found:
            assert found["counts"][0] == found["counts"][-1] == 2
            assert sum(found["counts"]) == 34
    profile.write_text("{")
    config["selector"]["profile"] = str(profile)
    (run / "config.json").write_text(json.dumps(config))
    found = read_run(run, max_samples=8).profile
    assert found is not None
    assert "line 1" in found["note"]
    assert "Invalid JSON" in found["note"]
