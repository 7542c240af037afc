"use strict";
/* Shows the page, and keeps one that `winnow watch` serves up to date. A page in a file has nobody to ask. */
(() => {
  const EVERY_MS = 2000;
  const view = { hidden: new Set(), focus: 0 };
  const first = JSON.parse(document.getElementById("data").textContent);
  const app = document.getElementById("app");
  const controls = () => [...app.querySelectorAll("select, input, details, button, a, .plot")].filter((c) => !c.closest(".samples"));

  /** Build it again, with what was chosen, opened, scrolled to and focused. */
  function again(data) {
    const before = controls();
    const kept = before.map((c) => [c.value, c.checked, c.open]);
    const focused = before.indexOf(document.activeElement);
    const at = scrollY;
    charts.clear();
    report(data, view);
    const after = controls();
    if (after.length === before.length) {
      after.forEach((control, n) => {
        const [value, , open] = kept[n];
        if (control.tagName === "DETAILS") control.open = open;
        else if (control.matches("select, input[type=search]") && control.value !== value) {
          control.value = value;
          control.dispatchEvent(new Event(control.tagName === "SELECT" ? "change" : "input"));
        }
      });
      if (focused >= 0) after[focused].focus({ preventScroll: true });
    }
    scrollTo({ top: at, behavior: "instant" });
  }

  function follow(mark) {
    const state = dom.el("span", { role: "status" });
    const button = dom.el("button", { "aria-pressed": "false", onclick: () => say(button.getAttribute("aria-pressed") === "false") }, "pause");
    document.body.append(dom.el("div", { class: "live" }, state, button));
    function say(paused, text) {
      button.setAttribute("aria-pressed", String(paused));
      button.textContent = paused ? "go on" : "pause";
      state.textContent = text || (paused ? "paused" : "live");
    }
    async function ask() {
      if (button.getAttribute("aria-pressed") === "false") {
        try {
          const answer = await fetch(`data.json${location.search}`, { headers: { "If-None-Match": mark }, cache: "no-store" });
          if (answer.status === 200) {
            mark = answer.headers.get("ETag");
            again(await answer.json());
          }
          say(false, answer.ok || answer.status === 304 ? "live" : `the server says ${answer.status}`);
        } catch {
          say(false, "the server does not answer");
        }
      }
      setTimeout(ask, EVERY_MS);
    }
    say(false);
    setTimeout(ask, EVERY_MS);
  }

  report(first, view);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts.redraw);
  if (first.live) follow(first.live);
})();
