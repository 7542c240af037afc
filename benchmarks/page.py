"""The page of twenty runs of 10,000 steps: what it takes to build, to open in a real Chromium, and to look around in.

Each run directory is written by the run's own writers (metrics, samples, ledger). The names of the metrics and where
their values lie come from a short real training; what follows is noise around it, so nothing can be learnt from curves.

python benchmarks/page.py --out benchmarks/results/page.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from playwright.sync_api import Page, sync_playwright
from transformers import AutoTokenizer

from winnow import Trainer
from winnow.base.files import write_json
from winnow.config import RunConfig, validate
from winnow.env.prompting import decode
from winnow.methods.group_kind import BY_REWARDS
from winnow.record.ledger import Ledger
from winnow.record.records import CONFIG, LEDGER, METRICS, Records
from winnow.study.warm_start import WarmStartConfig, warm_start
from winnow.tasks.countdown import CountdownConfig
from winnow.types import Fate, Group, Prompt, Rollout, Turn, Visit

GROUPS, SIBLINGS, TOKENS = 2, 4, 40
"""Groups of a step, their rollouts, and tokens of each."""
EVERY = 100
"""Steps from one evaluation to the next."""
GROWING = ("step", "num_tokens", "seconds_total")
BUSY = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
DRAWN = (
    """() => [...document.querySelectorAll(".plot")].every((p) => !p.checkVisibility() || p.querySelector(".uplot"))"""
)
FRAMES = """() => {
  const deltas = (window.deltas = []);
  let last = null;
  const frame = (now) => {
    if (last !== null) deltas.push(now - last);
    last = now;
    window.going = requestAnimationFrame(frame);
  };
  window.going = requestAnimationFrame(frame);
}"""


@dataclass
class Pattern:
    """What a real run logged: its configuration and tokenizer, and mean and spread of each metric."""

    config: RunConfig
    tokenizer: Any
    steps: dict[str, tuple[float, float]]
    evaluations: dict[str, tuple[float, float]]


def pattern(work: Path) -> Pattern:
    """Trains a tiny model for twelve steps."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    task = CountdownConfig(train_size=64, test_size=16).build()
    warm_start(task, work / "model", config=WarmStartConfig(max_steps=30, batch_size=32, warmup_steps=5, **shape))
    values = {
        "model": str(work / "model"),
        "env": {"name": "countdown", "train_size": 64, "test_size": 16},
        "output_dir": str(work / "real"),
        "threads": 1,
        "max_steps": 12,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 12,
        "eval_steps": 4,
        "eval_prompts": 8,
        "eval_generations": 2,
        "selector": "greso",
        "gates": ["arrol"],
        "beta": 0.01,
        "log_completions": 1,
    }
    trainer = Trainer(config=validate(values))
    trainer.train()
    rows = [json.loads(line) for line in (work / "real" / METRICS).read_text().splitlines()]
    split = [{k: v for k, v in row.items() if k.startswith("eval/") == held_out} for row in rows for held_out in (0, 1)]
    return Pattern(
        validate(values),
        AutoTokenizer.from_pretrained(work / "model"),
        *(
            {
                k: (float(np.mean(v)), float(np.std(v)))
                for k in dict.fromkeys(key for row in part for key in row)
                if k not in GROWING and len(v := [row[k] for row in part if k in row])
            }
            for part in (split[::2], split[1::2])
        ),
    )


def write_run(path: Path, like: Pattern, steps: int, seed: int) -> Path:
    """One run directory."""
    draw = np.random.default_rng(seed)
    path.mkdir(parents=True)
    config = like.config.model_copy(update={"seed": seed, "max_steps": steps, "output_dir": str(path)})
    write_json(path / CONFIG, config.model_dump(mode="json"))
    records = Records(path, config, tokenizer=like.tokenizer)
    noise = {k: draw.normal(m, s + 0.02 * abs(m), steps + 1).tolist() for k, (m, s) in like.steps.items()}
    with Ledger.open(path / LEDGER) as ledger:
        ledger.judge = BY_REWARDS
        ledger.set_meta("max_lag", "0")
        for step in range(1, steps + 1):
            groups = [group(like, draw, GROUPS * (step - 1) + i, step) for i in range(GROUPS)]
            row = {"step": step, "num_tokens": step * GROUPS * SIBLINGS * TOKENS, "seconds_total": 0.2 * step}
            row |= {key: values[step] for key, values in noise.items()}
            if step % EVERY == 0:
                row |= {k: float(draw.normal(m, s)) for k, (m, s) in like.evaluations.items()}
            ledger.visit([g.visit for g in groups], step=step, version=step - 1)
            for g in groups:
                ledger.finish(g, step=step)
            ledger.step(step, seconds={"generate": 0.2}, metrics={"reward": row["reward"]}, version=step - 1)
            records.metrics(row)
            records.samples(step, groups, "train")
        ledger.set_meta("finished", "true")
    records.close()
    return path


def group(like: Pattern, draw: np.random.Generator, number: int, step: int) -> Group:
    ids_SN = draw.integers(0, len(like.tokenizer), (SIBLINGS, TOKENS))
    rewards = draw.integers(0, 2, SIBLINGS).tolist()
    fate = Fate.FILTERED if len(set(rewards)) == 1 else Fate.TRAINED
    rollouts = [
        Rollout(
            sibling=i,
            prompt_ids=(1, 2, 3),
            token_ids=ids_N,
            action_mask=np.ones(TOKENS, bool),
            sampler_logp=-draw.exponential(0.7, TOKENS).astype(np.float32),
            versions=np.full(TOKENS, step - 1, np.int32),
            turns=[Turn(text, None, 0, TOKENS, "length")],
            stop_reason="length",
            text=text,
            reward=float(rewards[i]),
            fate=fate,
            seconds=0.01,
        )
        for i, (ids_N, text) in enumerate(zip(ids_SN, decode(like.tokenizer, list(ids_SN)), strict=True))
    ]
    return Group(Visit(number, number // 64, Prompt(f"p{number % 64}", number % 64, "numbers 1 2 3 :")), rollouts)


def hover(page: Page) -> None:
    """The cursor over a chart, to and fro."""
    box = page.locator(".plot").first.bounding_box()
    assert box is not None
    for i in range(120):
        there = abs((i / 40) % 2 - 1)
        page.mouse.move(box["x"] + (0.15 + 0.7 * there) * box["width"], box["y"] + box["height"] / 2)


def scroll(page: Page) -> None:
    """From the top to the end and back."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for by in (400, -400):
        for _ in range(height // 400):
            page.mouse.wheel(0, by)


def zoom(page: Page) -> None:
    """A part of a chart, then all of it again, a few times."""
    box = page.locator(".plot").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    for _ in range(3):
        page.mouse.move(box["x"] + 0.3 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], middle, steps=20)
        page.mouse.up()
        page.mouse.dblclick(box["x"] + 0.5 * box["width"], middle)


def frames(page: Page, act: Callable[[Page], None]) -> list[float]:
    """Milliseconds from frame to frame while `act` goes on, and until the browser has caught up."""
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    page.evaluate(FRAMES)
    act(page)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    deltas: list[float] = page.evaluate("(cancelAnimationFrame(window.going), window.deltas)")
    return deltas


def looked_at(file: Path, repeats: int) -> dict[str, Any]:
    """Times of opening the page afresh and of its frames."""
    shown, loaded, drawn, found = [], [], [], {act.__name__: [] for act in (hover, scroll, zoom)}
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=BUSY)
        for _ in range(repeats):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(file.as_uri())
            page.wait_for_selector(".uplot")
            page.wait_for_function(DRAWN)
            drawn.append(page.evaluate("performance.now()"))
            shown.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            loaded.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
            for act in (hover, scroll, zoom):
                found[act.__name__] += frames(page, act)
            page.close()
        version = browser.version
        browser.close()
    return {
        "chromium": version,
        "first_paint_ms": summary(shown),
        "load_ms": summary(loaded),
        "all_drawn_ms": summary(drawn),
        "frame_ms": {name: summary(deltas) for name, deltas in found.items()},
    }


def summary(values: list[float]) -> dict[str, float]:
    keys = ("median", "p95", "max")
    return {k: round(float(np.quantile(values, q)), 1) for k, q in zip(keys, (0.5, 0.95, 1), strict=True)} | {
        "n": len(values)
    }


def built(runs: list[Path], output: Path, repeats: int) -> dict[str, Any]:
    """What `winnow report` takes, its imports included."""
    seconds, mib = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "winnow.cli.main", "report", *map(str, runs), "-o", str(output)]
        )
        _, status, used = os.wait4(process.pid, 0)
        assert status == 0
        seconds.append(time.perf_counter() - started)
        mib.append(used.ru_maxrss / 1024)
    return {"build_s": summary(seconds), "peak_mib": summary(mib), "bytes": output.stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for the run directories; those of an earlier call are used")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("no Chromium here: apt install chromium")
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        runs = [work / f"run-{n}" for n in range(options.runs)]
        if not runs[-1].exists():
            like = pattern(work)
            for n, path in enumerate(runs):
                write_run(path, like, options.steps, n)
        table: dict[str, Any] = {"machine": machine("cpu", "playwright"), "steps": options.steps}
        for name, some in {"one run": runs[:1], f"{len(runs)} runs": runs}.items():
            table[name] = built(some, work / "page.html", options.repeats)
            table[name] |= looked_at(work / "page.html", options.repeats)
    options.out.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
