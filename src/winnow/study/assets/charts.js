"use strict";
/* Charts over uPlot: lines (one a run, or one a metric) and stacked areas, on a switchable x axis. */
const charts = (() => {
  const AXES = {
    step: { key: "step", label: "step", format: compact },
    tokens: { key: "num_tokens", label: "sampled tokens", format: compact },
    seconds: { key: "seconds_total", label: "wall clock", format: duration },
  };
  /** Curves of a chart beyond which what was smoothed is not drawn beside it. */
  const CROWD = 8;
  const live = new Set();
  /** What was switched off and which axis is logarithmic, by the chart's title. */
  const chosen = new Map();
  let axis = "step";
  let smoothing = true;
  /** The part of the x axis that all charts show, [from, to]; null: all of it. */
  let zoom = null;

  /** 1234567 -> "1.23M", 0.000123 -> "1.2e-4". */
  function compact(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 999.5) {
      const [unit, by] = size >= 9.995e8 ? ["G", 1e9] : size >= 9.995e5 ? ["M", 1e6] : ["k", 1e3];
      return String(+(value / by).toPrecision(3)) + unit;
    }
    if (size === 0) return "0";
    return size < 1e-3 ? value.toExponential(1).replace(/\.0e/, "e") : String(+value.toPrecision(4));
  }

  /** Seconds -> "45s", "3m20", "2h05". */
  function duration(value) {
    if (value === null || value === undefined) return "–";
    const two = (n) => String(n).padStart(2, "0");
    const s = Math.round(value);
    if (value < 10) return `${+value.toPrecision(2)}s`;
    if (s < 60) return `${s}s`;
    if (s < 3600) return s % 60 ? `${Math.floor(s / 60)}m${two(s % 60)}` : `${s / 60}m`;
    const m = Math.round(s / 60);
    return m % 60 ? `${Math.floor(m / 60)}h${two(m % 60)}` : `${m / 60}h`;
  }

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const faded = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

  const percent = (value) => (value == null ? "–" : `${+(100 * value).toPrecision(3)}%`);

  /** Mean under a centred triangular window, so that a curve is smoothed without being delayed. */
  function smoothed(values) {
    const half = Math.max(2, Math.round(values.length / 40));
    return values.map((value, i) => {
      if (value === null) return null;
      let sum = 0;
      let weight = 0;
      for (let j = Math.max(0, i - half); j <= Math.min(values.length - 1, i + half); j++) {
        if (values[j] === null) continue;
        const w = half + 1 - Math.abs(i - j);
        sum += w * values[j];
        weight += w;
      }
      return sum / weight;
    });
  }

  /** Rows of `table` where x grows and a key has a value: [x, ...values by key]. */
  function select(table, keys) {
    const x = table[AXES[axis].key] || [];
    const rows = [];
    let last = -Infinity;
    x.forEach((at, i) => {
      if (at === null || at <= last || keys.every((k) => (table[k] || [])[i] == null)) return;
      rows.push(i);
      last = at;
    });
    return [rows.map((i) => x[i]), ...keys.map((k) => rows.map((i) => (table[k] || [])[i] ?? null))];
  }

  function xAxis() {
    return {
      stroke: color("soft"), font: "11px system-ui", size: 24, gap: 4, space: 56,
      grid: { stroke: color("grid"), width: 1 }, ticks: { show: false },
      values: (_, ticks) => ticks.map((t) => AXES[axis].format(t)),
    };
  }

  function yAxis(format, log) {
    return {
      stroke: color("soft"), font: "11px system-ui", gap: 4, space: 34,
      size: (_, texts) => 12 + 6.4 * Math.max(2, ...(texts || []).map((t) => t.length)),
      grid: { stroke: color("grid"), width: 1, ...(log ? { filter: decades } : {}) }, ticks: { show: false },
      values: (_, ticks, axisIndex, space, step) => ticks.map((t) => (t === null ? "" : format === compact && !log && Math.abs(t) < 1000 ? rounded(t, step) : format(t))),
    };
  }

  /** As many decimals as tell neighbouring ticks apart. */
  function rounded(tick, step) {
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return decimals > 4 ? compact(tick) : String(+tick.toFixed(decimals + (step * 10 ** decimals % 1 > 1e-9 ? 1 : 0)));
  }

  /** A logarithmic y axis has no place for what is not above 0, and shows at most eight decades. */
  const scaleOf = (spec) => (spec.log
    ? { distr: 3, log: 10, range: (_, low, high) => (low > 0 ? uPlot.rangeLog(Math.max(low, 1e-8 * high), high, 10, false) : [0.1, 1]) }
    : { range: range(spec) });
  const decades = (_, ticks) => ticks.map((t) => (Math.abs(Math.log10(t) % 1) < 1e-6 || Math.abs(Math.log10(t) % 1) > 1 - 1e-6 ? t : null));

  /** y from 0 when that costs little of the height; a share never beyond 1. */
  function range(spec) {
    return (_, low, high) => {
      if (low === null || high === null) return [0, 1];
      if (low === high && low >= 0) return [0, 1.25 * high || 1];
      const span = high - low || Math.abs(high);
      const bottom = low >= 0 && (spec.zero || spec.stacked || low < 0.6 * high) ? 0 : low - 0.08 * span;
      const top = high + 0.08 * (high - bottom || span);
      return [bottom, spec.share ? Math.min(1, top) : top];
    };
  }

  /** Values of the curves where the cursor is, or the last ones, into the legend. */
  function values(entries, cells, at, format) {
    const show = (u) => {
      const x = u.data[0];
      const i = u.cursor.idx == null || u.cursor.left < 0 ? x.length - 1 : u.cursor.idx;
      at.textContent = `${AXES[axis].label} ${AXES[axis].format(x[i])}`;
      entries.forEach((e, n) => {
        let j = i;
        while (j > 0 && e.values[j] == null && u.cursor.left < 0) j--;
        const text = e.values[j] == null ? "" : format(e.values[j]);
        if (cells[n].textContent !== text) cells[n].textContent = text;
      });
    };
    return { hooks: { setCursor: show, ready: show } };
  }

  /** Dashed lines across the plot; `marks` are {color} and where they are on each axis. */
  function marker(marks) {
    return { hooks: { draw: ({ ctx, bbox, scales, valToPos }) => marks.forEach((mark) => {
      const at = mark[AXES[axis].key];
      if (at == null || at < scales.x.min || at > scales.x.max) return;
      const x = Math.round(valToPos(at, "x", true));
      ctx.save();
      ctx.strokeStyle = color(mark.color);
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.restore();
    }) } };
  }

  /** uPlot's data and series for lines: `curves` are {name, table, key, color, dash, band: [low key, high key]}. */
  function lines(spec, curves) {
    const above = (list, j) => (spec.log && j ? list.map((v) => (v > 0 ? v : null)) : list);
    const shown = curves.map((c) => select(c.table, [c.key, ...(c.band || [])]).map(above)).map((d, i) => ({ ...curves[i], data: d }));
    const full = shown.filter((c) => c.data[0].length);
    const joined = full.length ? uPlot.join(full.map((c) => c.data)) : [[]];
    const series = [{}];
    const data = [joined[0]];
    const entries = [];
    const bands = [];
    let column = 1;
    full.forEach((c) => {
      const [values, low, high] = joined.slice(column, column + c.data.length - 1).map((list) => list.map((v) => v ?? null));
      column += c.data.length - 1;
      const stroke = color(c.color);
      const smooth = smoothing && !spec.points && c.data[1].length > 40;
      const common = { spanGaps: true, points: { show: !!spec.points || c.data[1].length < 3, size: 6, fill: stroke } };
      if (c.band) {
        bands.push({ series: [series.length, series.length + 1], fill: faded(stroke, 0.14) });
        for (const edge of [high, low]) {
          series.push({ spanGaps: true, stroke: faded(stroke, 0.3), width: 0.5, points: { show: false }, quiet: true });
          data.push(edge);
        }
      }
      if (smooth) {
        const bySmooth = new Map(smoothed(c.data[1]).map((v, i) => [c.data[0][i], v]));
        if (full.length <= CROWD) {
          series.push({ ...common, stroke: faded(stroke, curves.length > 2 ? 0.12 : 0.28), width: 1, quiet: true });
          data.push(values);
        }
        series.push({ ...common, stroke, width: full.length <= CROWD ? 2 : 1.4, dash: c.dash });
        data.push(joined[0].map((x) => bySmooth.get(x) ?? null));
      } else {
        series.push({ ...common, stroke, width: spec.points ? 2 : 1.6, dash: c.dash });
        data.push(values);
      }
      entries.push({ name: c.name, color: stroke, values: data[data.length - 1] });
    });
    return { series, data, entries, bands };
  }

  /** The same for stacked areas: painted from the top of the stack down, each over the one above it. */
  function stack(curves) {
    const [x, ...columns] = select(curves[0].table, curves.map((c) => c.key));
    const smooth = (values) => (smoothing && x.length > 40 ? smoothed(values) : values);
    const used = curves.map((c, n) => ({ ...c, values: smooth(columns[n].map((v) => v ?? 0)) })).filter((c) => c.values.some((v) => v > 0));
    const tops = [];
    used.forEach((c, n) => tops.push(c.values.map((v, i) => v + (n ? tops[n - 1][i] : 0))));
    const series = [{}];
    const data = [x];
    for (let n = used.length - 1; n >= 0; n--) {
      const fill = color(used[n].color);
      series.push({ stroke: fill, fill, width: 0.5, points: { show: false } });
      data.push(tops[n]);
    }
    const entries = used.map((c) => ({ name: c.name, color: color(c.color), values: c.values, part: true })).reverse();
    return { series, data, entries };
  }

  /** The legend: where the cursor is, then a switch for each curve with its colour, name and value. */
  function fillLegend(legend, curves, made, off, spec, draw) {
    const at = dom.el("span", { class: "at" });
    const cells = new Map();
    const switches = curves.map((c) => {
      const cell = dom.el("span", { class: "number" });
      cells.set(c.name, cell);
      const flip = () => { off.has(c.name) ? off.delete(c.name) : off.add(c.name); draw(c.name); };
      return dom.el("button", { class: "switch", "aria-pressed": String(!off.has(c.name)), "data-name": c.name, onclick: flip },
        dom.key(c.name, c.color, spec.stacked ? "" : c.dash ? "line dash" : "line"), cell);
    });
    legend.replaceChildren(at, ...switches);
    return values(made.entries, made.entries.map((e) => cells.get(e.name)), at, spec.format || compact);
  }

  function save(name, url) {
    dom.el("a", { href: url, download: name }).click();
  }

  /** `x, curve, curve, ...` without smoothing; of a long series means over rows, at the last of them. */
  function csv(curves) {
    const drawn = curves.map((c) => select(c.table, [c.key])).map((d) => d.slice(0, 2));
    const [x, ...columns] = uPlot.join(drawn);
    const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const head = [AXES[axis].key, ...curves.map((c) => quoted(c.name))].join(",");
    return [head, ...x.map((at, i) => [at, ...columns.map((c) => c[i] ?? "")].join(","))].join("\n");
  }

  function picture(plot, title) {
    const from = plot.ctx.canvas;
    const canvas = dom.el("canvas", { width: from.width, height: from.height + 30 * devicePixelRatio });
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = color("card");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = color("ink");
    ctx.font = `600 ${14 * devicePixelRatio}px system-ui`;
    ctx.fillText(title, 12 * devicePixelRatio, 20 * devicePixelRatio);
    ctx.drawImage(from, 0, 30 * devicePixelRatio);
    return canvas.toDataURL("image/png");
  }

  /** Left and right move the cursor from value to value. */
  function walk(event, plot) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !plot) return;
    event.preventDefault();
    const last = plot.data[0].length - 1;
    const i = Math.max(0, Math.min(last, (plot.cursor.idx ?? last + (by < 0 ? 1 : 0)) + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][i], "x"), top: 10 });
  }

  /** The chart that is dragged over. */
  let source = null;

  /** Keeps the part that was dragged over: uPlot shows it in the charts in sight, the others do once they are. */
  function zoomTo(part) {
    zoom = part;
    live.forEach((chart) => { if (chart.seen) chart.zoom = part; });
  }
  const zoomer = { hooks: {
    setSelect: (u) => u === source && u.select.width > 0 && zoomTo([0, u.select.width].map((w) => u.posToVal(u.select.left + w, "x"))),
    ready: (u) => {
      u.over.addEventListener("mousedown", () => { source = u; });
      u.over.addEventListener("dblclick", () => zoomTo(null));
    },
  } };

  /** A dot at the cursor for each curve, but for edges of bands and what is drawn smoothed beside. */
  const DOT = "width:7px;height:7px;margin:-3.5px 0 0 -3.5px";
  const dot = (u, n) => (u.series[n].quiet ? null : dom.el("div", { style: DOT }));

  /** Buttons of a chart: log axis, values, picture. */
  function toolsOf(spec, title, kept, draw, getCurves, getPlot) {
    const file = title.replace(/[^\w@]+/g, "-");
    const tool = (text, label, act, pressed) => dom.el("button", { "aria-label": `${label}: ${title}`, title: label, "aria-pressed": pressed, onclick: act }, text);
    return [...(spec.stacked ? [] : [tool("log", "Logarithmic y axis", (e) => {
      kept.log = !kept.log;
      e.currentTarget.setAttribute("aria-pressed", String(kept.log));
      draw();
    }, String(kept.log))]),
    tool("csv", "Save the values", () => {
      const curves = getCurves();
      const averaged = Math.max(...curves.map((c) => c.averaged || 1));
      const means = averaged > 1 ? `-mean-of-${averaged}-${spec.evals ? "evaluations" : "steps"}` : "";
      save(`${file}${means}.csv`, `data:text/csv;charset=utf-8,${encodeURIComponent(csv(curves))}`);
    }),
    tool("png", "Save the picture", () => getPlot() && save(`${file}.png`, picture(getPlot(), title)))];
  }

  /** Draw `spec` into `plot`, `legend` and `tools`; again whenever the width, the theme, the axis or the smoothing changes.
   * What is in sight is drawn first, and only that follows the cursor. */
  function mount({ plot: box, legend, tools, title }, spec, getCurves) {
    let plot = null;
    const kept = chosen.get(title) || { off: new Set(), log: !!spec.log };
    chosen.set(title, kept);
    const height = spec.height || 210;
    const chart = { seen: false, stale: true, zoom: null, unfolded: () => box.checkVisibility() };
    const draw = (name) => {
      if (plot) plot.destroy();
      plot = null;
      chart.stale = false;
      chart.zoom = zoom;
      box.replaceChildren();
      const width = box.clientWidth;
      const all = getCurves();
      const curves = all.filter((c) => !kept.off.has(c.name));
      const drawn = { ...spec, log: kept.log };
      const made = !width || !curves.length ? null : spec.stacked ? stack(curves) : lines(drawn, curves);
      const shown = made && made.data[0].length ? made : { entries: [] };
      const plugin = fillLegend(legend, all, shown, kept.off, spec, draw);
      if (name) [...legend.children].find((c) => c.dataset.name === name)?.focus();
      if (!shown.data) return;
      const format = spec.format || compact;
      const holder = document.createElement("div");
      box.append(holder);
      plot = new uPlot({
        width, height, series: made.series, bands: made.bands, padding: [8, 10, 0, 0], legend: { show: false },
        scales: { x: { time: false }, y: scaleOf(drawn) },
        axes: [xAxis(), yAxis(format, kept.log)],
        cursor: { y: false, points: { show: spec.stacked ? false : dot, size: 7 }, drag: { x: true, y: false }, sync: { key: "x", filters: { pub: () => true, sub: () => chart.seen } } },
        plugins: [plugin, marker(spec.marks ? spec.marks() : []), zoomer],
      }, made.data, holder);
      if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
      const ends = made.entries.slice(0, 8).map((e) => `${e.name} ${format(e.values.findLast((v) => v != null))}`);
      box.setAttribute("aria-label", `${title}, at ${AXES[axis].label} ${AXES[axis].format(made.data[0].at(-1))}: ${ends.join(", ")}`);
    };
    box.setAttribute("role", "img");
    box.tabIndex = 0;
    box.style.minHeight = `${height}px`;
    box.addEventListener("keydown", (event) => walk(event, plot));
    tools.append(...toolsOf(spec, title, kept, draw, getCurves, () => plot));
    fillLegend(legend, getCurves(), { entries: [] }, kept.off, spec, draw);
    chart.draw = () => draw();
    const size = new ResizeObserver(() => {
      const width = box.clientWidth;
      if (plot && width && plot.width !== width) plot.setSize({ width, height });
      else if (!plot && width) later(chart);
    });
    const sight = new IntersectionObserver((found) => {
      chart.seen = found.at(-1).isIntersecting;
      if (chart.seen && (chart.stale || chart.zoom !== zoom)) draw();
    }, { rootMargin: "150px" });
    chart.stop = () => { size.disconnect(); sight.disconnect(); };
    live.add(chart);
    size.observe(box);
    sight.observe(box);
  }

  /** Draw what is out of sight one by one, when there is nothing else to do. */
  let waiting = false;
  const idle = window.requestIdleCallback || ((act) => setTimeout(act, 50));
  function later(chart) {
    chart.stale = true;
    if (waiting) return;
    waiting = true;
    idle(() => {
      waiting = false;
      const [first, ...more] = [...live].filter((c) => c.stale && c.unfolded());
      if (first) first.draw();
      if (more.length) later(more[0]);
    });
  }

  function redraw() {
    live.forEach((chart) => (chart.seen ? chart.draw() : later(chart)));
  }

  return {
    mount, redraw, compact, duration, percent,
    axis: () => axis,
    smooth: () => smoothing,
    clear: () => { live.forEach((chart) => chart.stop()); live.clear(); },
    setAxis: (name) => { axis = name; zoom = null; redraw(); },
    setSmoothing: (on) => { smoothing = on; redraw(); },
  };
})();
