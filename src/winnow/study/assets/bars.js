"use strict";
/* A histogram of few bins: one bar each, its count above, its label below. */
const bars = (() => {
  function part(name, text, title) {
    const node = document.createElement("div");
    node.className = name;
    if (title) node.title = title;
    node.textContent = text;
    return node;
  }

  /** `bins` are {label, count, color}; heights are relative to the largest count. */
  function histogram(bins) {
    const most = Math.max(1, ...bins.map((b) => b.count));
    const total = Math.max(1, bins.reduce((sum, b) => sum + b.count, 0));
    const box = part("bars", "");
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", bins.map((b) => `${b.label}: ${b.count}`).join(", "));
    box.append(...bins.map((b) => {
      const column = part("column", "", `${b.label}: ${b.count} (${(100 * b.count / total).toFixed(1)}%)`);
      const bar = part("fill", "");
      bar.style.height = `${100 * b.count / most}%`;
      bar.style.setProperty("--swatch", `var(--${b.color})`);
      const space = part("space", "");
      space.append(part("count", b.count ? charts.compact(b.count) : ""), bar);
      column.append(space, part("label", b.label));
      return column;
    }));
    return box;
  }

  return { histogram };
})();
