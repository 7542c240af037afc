"""The page in a real Chromium, from a file and from `winnow watch`: sizes, keyboard, contrast, export, hostile text."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from winnow.base.sanitize import visible
from winnow.study.compare import compare
from winnow.study.compare_view import write_page
from winnow.study.report import write_report

from ..builders.pages import HOSTILE, decision, make_run, sample
from ..builders.watch import serving

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright drives the browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]

CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const lum = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((v, i) => a * v + (1 - a) * under[i]);
  const back = (node) => {
    if (!node) return [255, 255, 255];
    const own = getComputedStyle(node).backgroundColor;
    const c = own.startsWith("color(") ? parse(own).map((v, i) => i < 3 ? 255 * v : v) : parse(own);
    return (c[3] ?? 1) === 1 ? c.slice(0, 3) : over(c, back(node.parentElement));
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    if (node.matches("script, noscript, option")) continue;
    const under = back(node);
    const ink = over(parse(getComputedStyle(node).color), under);
    const [a, b] = [lum(ink), lum(under)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) bad.push([walker.currentNode.textContent.trim().slice(0, 30), node.className, +ratio.toFixed(2)]);
  }
  return bad;
}"""
BELOW = "([head, edge]) => head.getBoundingClientRect().top >= edge && head.getBoundingClientRect().top < edge + 40"
DRAWN = (
    """() => [...document.querySelectorAll(".plot")].every((p) => !p.checkVisibility() || p.querySelector(".uplot"))"""
)
SMALL = """() => [...document.querySelectorAll("button, select, input[type=search], summary, label.key, nav a")]
  .filter((n) => n.checkVisibility()).map((n) => [n.textContent.slice(0, 20), n.getBoundingClientRect().height])
  .filter(([, height]) => height < 43.5)"""


CUT = """() => [...document.querySelectorAll(".legend")].filter((n) => n.checkVisibility()).filter((n) => {
  const box = n.getBoundingClientRect();
  const outside = (c) => c.bottom > box.bottom + .5 || c.right > innerWidth || c.top < box.top - .5;
  return n.scrollHeight > n.clientHeight || n.scrollWidth > n.clientWidth
    || [...n.children].some((c) => outside(c.getBoundingClientRect()));
}).map((n) => n.textContent)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield found
        found.close()


class Tab:
    """A page that keeps what its console complained of."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.goto(address)
        self.page.wait_for_selector(".uplot")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of one run, of four, of those six times each, of a hostile one, and of agents with several segments."""
    root = tmp_path_factory.mktemp("pages")
    runs = [make_run(root / name, steps=60, seed=n) for n, name in enumerate(["grpo", "greso", "dapo", "all of them"])]
    turns = [{"at": 0, "chars": [1] * len(HOSTILE), "logp": [-1.0] * len(HOSTILE)}]
    gates = [decision(n, n % 2 == 0, gate=HOSTILE, reason=HOSTILE) for n in range(0, 30, 5)]
    texts = {"prompt": HOSTILE, "completion": HOSTILE, "prompt_id": HOSTILE, "turns": turns, "decisions": gates}
    hostile = [sample(1, HOSTILE, 1.0, **texts)]
    evil = make_run(root / "<img src=x onerror=alert(1)>", steps=4, samples=hostile)
    critic = {"agent": "critic", "char": 9, "prompt_tokens": 1200, "shared": 0, "like": 0, "new": "Is it 8?"}
    solver = {"agent": "solver", "char": 13, "prompt_tokens": 640, "shared": 600, "like": 0, "new": HOSTILE}
    segments = {"segments": 3, "agent": "solver", "later": [critic, solver], "decisions": []}
    agents = make_run(root / "agents", steps=4, samples=[sample(1, "trained", 1.0, **segments)])
    found = {name: root / f"{name}.html" for name in ("one", "four", "many", "hostile", "segments")}
    write_report([agents], found["segments"])
    write_report(runs[:1], found["one"])
    write_report(runs, found["four"])
    write_report(runs * 6, found["many"])
    write_report([evil, runs[0]], found["hostile"])
    return found


@pytest.mark.cases(one_in=18)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("name", ["one", "four", "many"])
def test_sizes_and_contrast(browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    viewport = {"width": width, "height": 900}
    tab = Tab(browser, pages[name].as_uri(), viewport=viewport, color_scheme=scheme)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.page.evaluate(CONTRAST) == []
    assert tab.page.locator("nav a").first.is_visible()
    if width == 390:
        assert tab.page.evaluate(SMALL) == []
    assert tab.complaints == []
    tab.page.close()


@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 7))])
def test_legends_are_whole(browser: Any, tmp_path: Path, count: int) -> None:
    names = [
        "grpo",
        "greso with a longer name",
        "dapo",
        "all of them",
        "sequential, probe 4",
        "countdown-lr-1e-4-seed-3",
    ]
    runs = [make_run(tmp_path / name, steps=60, seed=n) for n, name in enumerate(names[:count])]
    write_report(runs, tmp_path / "report.html")
    pages = [tmp_path / "report.html"]
    if count > 1:
        write_page(compare(runs, seeds=False), tmp_path / "compare.html")
        pages.append(tmp_path / "compare.html")
    for page in pages:
        for width in (390, 1280, 1920):
            tab = Tab(browser, page.as_uri(), viewport={"width": width, "height": 900})
            legend = tab.page.locator(".chart .legend").first
            assert legend.locator(".switch").count() == count
            assert tab.page.evaluate(CUT) == []
            tab.page.close()


def test_charts_by_keyboard_and_their_legends(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    tab = Tab(browser, pages["one"].as_uri(), viewport={"width": 1280, "height": 900})
    card = tab.page.locator(".chart", has=tab.page.get_by_role("heading", name="Held-out evaluation"))
    plot, at = card.locator(".plot"), card.locator(".at")
    assert str(plot.get_attribute("aria-label")).startswith("Held-out evaluation, at step 60: pass@1 0.46")
    assert at.inner_text() == "step 60"
    plot.focus()
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.wait_for_function("node => node.textContent === 'step 40'", arg=at.element_handle())
    switch = card.get_by_role("button", name="pass@1")
    assert switch.inner_text().split() == ["pass@1", "0.36"]
    switch.focus()
    tab.page.keyboard.press("Enter")
    assert switch.get_attribute("aria-pressed") == "false"
    assert tab.page.evaluate("document.activeElement.dataset.name") == "pass@1"
    with tab.page.expect_download() as download:
        card.get_by_role("button", name="Save the values").click()
    download.value.save_as(tmp_path / "values.csv")
    rows = list(csv.reader((tmp_path / "values.csv").read_text().splitlines()))
    assert rows[0] == ["step", "pass@1", "pass@8", "greedy"]
    assert [row[0] for row in rows[1:]] == ["0", "20", "40", "60"]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx([0.16, 0.26, 0.36, 0.46])
    with tab.page.expect_download() as download:
        card.get_by_role("button", name="Save the picture").click()
    download.value.save_as(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    card.get_by_role("button", name="Logarithmic y axis").click()
    assert card.get_by_role("button", name="Logarithmic y axis").get_attribute("aria-pressed") == "true"
    assert tab.complaints == []
    tab.page.close()


def test_a_file_of_means_has_that_in_its_name(browser: Any, tmp_path: Path) -> None:
    write_report([make_run(tmp_path / "long", steps=600)], tmp_path / "page.html")
    tab = Tab(browser, (tmp_path / "page.html").as_uri(), viewport={"width": 1280, "height": 900})
    for title, means in (("Gradient norm", "-mean-of-2-steps"), ("Held-out evaluation", "")):
        card = tab.page.locator(".chart", has=tab.page.get_by_role("heading", name=title))
        with tab.page.expect_download() as download:
            card.get_by_role("button", name="Save the values").click()
        assert download.value.suggested_filename == f"{title.replace(' ', '-')}{means}.csv"
    tab.page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_jump_ends_below_the_bar(browser: Any, pages: dict[str, Path], width: int) -> None:
    tab = Tab(browser, pages["many"].as_uri(), viewport={"width": width, "height": 900})
    bar = tab.page.locator(".bar")
    height = bar.bounding_box()["height"] if width == 1280 else 0  # on a phone it scrolls away
    assert height == 0 or height > 72, "several rows of runs"
    for name in ("Update", "Tokens"):
        tab.page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
        tab.page.locator("nav").get_by_role("link", name=name).click()
        head = tab.page.locator(f"#{name.lower()} h2").element_handle()
        tab.page.wait_for_function(BELOW, arg=[head, height])
    assert tab.complaints == []
    tab.page.close()


@pytest.mark.slow
def test_what_is_dragged_over_is_what_all_charts_show(browser: Any, pages: dict[str, Path]) -> None:
    """Those out of sight, too, once they are looked at; a double-click shows all of it again."""
    tab = Tab(browser, pages["one"].as_uri(), viewport={"width": 1280, "height": 600})
    titles = ("Training reward", "Tokens per second")
    first, last = (tab.page.locator(".chart", has=tab.page.get_by_role("heading", name=t, exact=True)) for t in titles)

    def across(card: Any, share: float) -> tuple[float, float]:
        box = card.locator(".u-over").bounding_box()
        return box["x"] + share * box["width"], box["y"] + box["height"] / 2

    def step_at(card: Any, share: float) -> float:
        card.scroll_into_view_if_needed()
        tab.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        card.locator(".u-over").wait_for()
        tab.page.mouse.move(*across(card, share))
        return float(card.locator(".at").inner_text().removeprefix("step "))

    assert (step_at(first, 0.02), step_at(last, 0.98)) == (1, 59)
    first.scroll_into_view_if_needed()
    tab.page.mouse.move(*across(first, 0.25))
    tab.page.mouse.down()
    tab.page.mouse.move(*across(first, 0.5), steps=4)
    tab.page.mouse.up()
    for card in (first, last):
        assert step_at(card, 0.02) == pytest.approx(15, abs=1)
        assert step_at(card, 0.98) == pytest.approx(30, abs=1)
    tab.page.mouse.dblclick(*across(last, 0.5))
    assert (step_at(last, 0.98), step_at(first, 0.02)) == (59, 1)
    assert tab.complaints == []
    tab.page.close()


def test_charts_out_of_sight_are_drawn_when_there_is_time(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["many"].as_uri(), viewport={"width": 1280, "height": 600})
    tab.page.wait_for_function(DRAWN)
    assert tab.page.locator(".uplot").count() > 15
    folded = tab.page.locator("#more .plot").first
    assert folded.locator(".uplot").count() == 0
    tab.page.locator("#more summary").first.click()
    folded.locator(".uplot").wait_for()
    assert tab.complaints == []
    tab.page.close()


def test_samples_of_one_prompt_and_their_siblings(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["one"].as_uri())
    card = tab.page.locator(".sample").first
    card.get_by_text("2 siblings").click()
    stopped = "■ arrol stopped at token 3: pruned at token 3: predicted success 0.10, survival 0.20"
    assert card.locator(".siblings pre").all_inner_texts() == [f"3 + 5{stopped}", "(empty)"]
    assert card.locator(".siblings .reward").all_inner_texts() == ["reward 0", "no reward"]
    card.get_by_role("button", name="this prompt over steps").click()
    assert tab.page.locator("#samples .head .soft").inner_text().startswith("1 of 60 samples")
    tab.page.get_by_label("Search", exact=True).fill("")
    assert tab.page.locator("#samples .head .soft").inner_text().startswith("60 of 60 samples")
    assert tab.complaints == []
    tab.page.close()


def test_tokens_say_their_probability_and_gates_stand_where_they_decided(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["one"].as_uri())
    card = tab.page.locator(".sample").first
    text, said = card.locator("pre.tokens"), card.locator(".said")
    assert text.locator(".token").all_inner_texts()[:4] == ["3", " +", " 5", " ="]
    assert text.evaluate("node => [...node.childNodes].map((n) => n.textContent).join('|')") == (
        "3| +| 5| =| 8|▸ arrol kept at token 3: score 0.5, predicted success 0.625| ,| 8| *| 2| =| 16|"
    )
    assert text.locator(".token").evaluate_all("nodes => nodes.map((n) => n.className)") == [
        *["token "] * 4,
        *["token p0", "token p1", "token p3"],
        *["token "] * 4,
        "token  silent",
    ]
    text.locator(".token").nth(5).hover()
    assert said.inner_text() == 'token 6: " ,", -2.43 nats, 8.8%'
    text.focus()
    tab.page.keyboard.press("ArrowLeft")
    assert said.inner_text() == 'token 5: " 8", -0.81 nats, 44.5%'
    assert text.locator(".chosen").count() == 1
    for _ in range(20):
        tab.page.keyboard.press("ArrowRight")
    assert said.inner_text() == "token 12: without a character, -0.20 nats, 81.9%"
    assert tab.complaints == []
    tab.page.close()


def test_segments_are_blocks_in_the_text(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["segments"].as_uri(), viewport={"width": 390, "height": 900})
    card = tab.page.locator(".sample").first
    assert "3 segments" in card.locator(".facts").first.inner_text()
    assert card.locator(".mark.segment").all_text_contents() == [
        "↻ segment 1, agent solver",
        "↻ segment 2, agent critic: 1,200 prompt tokens, none as in an earlier segment\nIs it 8?",
        f"↻ segment 3, agent solver: 640 prompt tokens, the first 600 as in segment 1\n{visible(HOSTILE)}",
    ]
    shown = "node => [...node.childNodes].map((n) => n.textContent.slice(0, 11)).join('|')"
    text = "↻ segment 1|3| +| 5| =| 8|↻ segment 2| ,| 8|↻ segment 3| *| 2| =| 16|"
    assert card.locator("pre.tokens").evaluate(shown) == text
    assert tab.page.evaluate(CONTRAST) == []
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.complaints == []
    tab.page.close()


def test_the_newest_samples_are_those_of_all_runs(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["four"].as_uri())
    newest = tab.page.locator(".sample > .facts > .key").all_inner_texts()[:4]
    assert sorted(newest) == ["all of them", "dapo", "greso", "grpo"]
    tab.page.close()


def test_nothing_of_a_run_becomes_markup(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["hostile"].as_uri())
    assert tab.page.locator("img").count() == 0
    tab.page.get_by_label("Search", exact=True).fill("alert(1)")
    assert "alert(1)" in tab.page.locator(".sample pre").first.inner_text()
    assert tab.page.locator(".sample .mark").count() == 7
    assert tab.complaints == []
    tab.page.close()


@pytest.mark.slow
def test_a_page_that_keeps_up(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    with serving(run) as server:
        tab = Tab(browser, server.url)
        chart = tab.page.locator(".chart").first
        assert chart.locator(".at").inner_text() == "step 20"
        tab.page.get_by_label("Fate", exact=True).select_option("filtered")
        tab.page.get_by_role("button", name="tokens", exact=True).click()
        tab.page.locator("#config summary").click()
        with (run / "metrics.jsonl").open("a") as file:
            row = {"step": 21, "reward": 0.5, "num_tokens": 9_870_000, "seconds_total": 999.0}
            file.write(json.dumps(row) + "\n")
        playwright.expect(chart.locator(".at")).to_have_text("sampled tokens 9.87M", timeout=15_000)
        assert tab.page.get_by_label("Fate", exact=True).input_value() == "filtered"
        assert tab.page.locator("#config details").evaluate("node => node.open")
        assert set(tab.page.locator(".sample > .facts .badge").all_inner_texts()) == {"filtered"}
        tab.page.get_by_role("button", name="pause").click()
        assert tab.page.get_by_role("status").inner_text() == "paused"
        assert tab.complaints == []
        tab.page.close()
