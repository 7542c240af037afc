"use strict";
/* A reliability diagram: predicted against realised success, a dot a bin, its area the share of rollouts in it. */
const reliability = (() => {
  const SIZE = 300, LEFT = 44, TOP = 10, BOTTOM = 40;

  function shape(tag, props, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  /** `points` are [predicted, realised, rollouts]. */
  function diagram(points, color) {
    const x = (v) => LEFT + SIZE * v;
    const y = (v) => TOP + SIZE * (1 - v);
    const most = Math.max(...points.map((p) => p[2]));
    const svg = shape("svg", {
      viewBox: `0 0 ${LEFT + SIZE + 12} ${TOP + SIZE + BOTTOM}`, class: "reliability", role: "img",
      "aria-label": points.map((p) => `predicted ${p[0].toFixed(2)}: ${p[1].toFixed(2)} right`).join(", "),
    });
    for (const v of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(shape("line", { x1: x(0), x2: x(1), y1: y(v), y2: y(v), class: "grid-line" }),
        shape("line", { y1: y(0), y2: y(1), x1: x(v), x2: x(v), class: "grid-line" }),
        shape("text", { x: x(v), y: y(0) + 16, "text-anchor": "middle" }, `${100 * v}%`),
        shape("text", { x: x(0) - 6, y: y(v) + 4, "text-anchor": "end" }, `${100 * v}%`));
    }
    svg.append(shape("line", { x1: x(0), x2: x(1), y1: y(0), y2: y(1), class: "diagonal" }),
      shape("text", { x: x(0.5), y: y(0) + 34, "text-anchor": "middle" }, "predicted success"),
      shape("text", { x: x(0) + 8, y: y(1) + 16 }, "right"));
    for (const [predicted, right, n] of points) {
      const dot = shape("circle", { cx: x(predicted), cy: y(right), r: 3 + 11 * Math.sqrt(n / most), fill: `var(--${color})` });
      dot.append(shape("title", {}, `predicted ${predicted.toFixed(3)}, right ${right.toFixed(3)}, ${Math.round(n).toLocaleString("en")} rollouts`));
      svg.append(dot);
    }
    return svg;
  }

  return { diagram };
})();
