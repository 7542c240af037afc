"use strict";
/* A histogram of few bins: one bar each, its count above, its label below. */
const bars = (() => {
  const { el } = dom;

  /** `bins` are {label, count, color}; heights are relative to the largest count. */
  function histogram(bins) {
    const most = Math.max(1, ...bins.map((b) => b.count));
    const total = Math.max(1, bins.reduce((sum, b) => sum + b.count, 0));
    const label = bins.map((b) => `${b.label}: ${b.count}`).join(", ");
    return el("div", { class: "bars", role: "img", "aria-label": label }, ...bins.map((b) =>
      el("div", { class: "column", title: `${b.label}: ${b.count} (${(100 * b.count / total).toFixed(1)}%)` },
        el("div", { class: "space" },
          el("div", { class: "count" }, b.count ? charts.compact(b.count) : null),
          el("div", { class: "fill", style: `height:${100 * b.count / most}%`, swatch: b.color })),
        el("div", { class: "label" }, b.label))));
  }

  return { histogram };
})();
