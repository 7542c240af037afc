"use strict";
/* Draws a comparison of methods. Strings are only ever set as text, never as markup. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const color = (n) => `c${n % 12}`;

  const { el } = dom;
  const key = (name, n) => dom.key(name, color(n), "line");

  function table() {
    const cell = ([mean, against, state]) => el("td", { class: "pair" }, el("div", {}, mean), el("div", { class: state || "soft" }, against));
    return el("div", { class: "card scroll", style: "margin-top:20px" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, "measure"), ...data.methods.map((m, n) => el("th", {}, key(m.name, n), el("div", { class: "soft" }, m.seeds))))),
      el("tbody", {}, ...data.measures.map((label, i) => el("tr", {}, el("td", {}, label), ...data.methods.map((m) => cell(m.cells[i])))))));
  }

  const [plot, legend, tools] = ["plot", "legend", "tools"].map((name) => el("div", { class: name }));
  document.getElementById("app").append(
    el("header", {}, el("div", { class: "brand" }, "Winnow"), el("h1", { dir: "auto" }, `${data.methods.length} methods compared`)),
    table(),
    el("p", { class: "soft below" }, "Mean over seeds with a 95% interval; below it the paired difference, or ratio (×), to ",
      el("b", { dir: "auto" }, data.baseline), `. Coloured where the interval excludes no difference. ${data.caution}`),
    el("ul", { class: "notes" }, ...data.notes.map((n) => el("li", { dir: "auto" }, n))),
    el("section", {}, el("div", { class: "card chart" }, el("div", { class: "top" },
      el("h3", {}, "Held-out pass@1 against tokens generated"), tools), plot, legend),
      el("p", { class: "soft below" }, "Lines are means over seeds at each evaluation, at the mean number of tokens sampled in training by then; bands reach from the worst to the best seed.")),
    el("section", {}, el("div", { class: "head" }, el("h2", {}, "Runs")), el("div", { class: "card" },
      ...data.methods.map((m, n) => el("div", {}, key(m.name, n), el("ul", { class: "notes" }, ...m.runs.map((r) => el("li", { dir: "auto" }, r))))))));
  charts.setAxis("tokens");
  charts.mount({ plot, legend, tools, title: "Held-out pass@1 against tokens generated" }, { points: true, share: true, height: 420 }, () => data.methods.map((m, n) => (
    { name: m.name, table: m.curve, key: "mean", color: color(n), band: m.runs.length > 1 ? ["low", "high"] : null })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts.redraw);
})();
