"use strict";
/* Charts over uPlot: lines (one a run, or one a metric) and stacked areas, on a switchable x axis. */
const charts = (() => {
  const AXES = {
    step: { key: "step", label: "step", format: compact },
    tokens: { key: "num_tokens", label: "sampled tokens", format: compact },
    seconds: { key: "seconds_total", label: "wall clock", format: duration },
  };
  const live = new Set();
  let axis = "step";
  let smoothing = true;

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
      stroke: color("faint"), font: "11px system-ui", size: 24, gap: 4, space: 56,
      grid: { stroke: color("grid"), width: 1 }, ticks: { show: false },
      values: (_, ticks) => ticks.map((t) => AXES[axis].format(t)),
    };
  }

  function yAxis(format, log) {
    return {
      stroke: color("faint"), font: "11px system-ui", gap: 4, space: 34,
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

  function tooltip(entries, format) {
    const box = document.createElement("div");
    box.className = "tip";
    box.hidden = true;
    const line = (name, value, dot) => {
      const row = document.createElement("div");
      row.className = "row";
      const key = document.createElement("span");
      key.className = "key";
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.setProperty("--swatch", dot);
      const text = document.createElement("span");
      text.textContent = name;
      key.append(swatch, text);
      const number = document.createElement("span");
      number.textContent = format(value);
      row.append(key, number);
      return row;
    };
    return {
      hooks: {
        init: (u) => u.root.parentElement.append(box),
        setCursor: (u) => {
          const i = u.cursor.idx;
          const shown = i == null || u.cursor.left < 0 ? [] : entries.filter((e) => e.values[i] != null && (!e.part || e.values[i] > 0));
          box.hidden = !shown.length;
          if (box.hidden) return;
          const title = document.createElement("b");
          title.textContent = `${AXES[axis].label} ${AXES[axis].format(u.data[0][i])}`;
          box.replaceChildren(title, ...shown.map((e) => line(e.name, e.values[i], e.color)));
          const left = u.bbox.left / devicePixelRatio + u.cursor.left;
          const flip = left > u.width / 2;
          box.style.left = flip ? "" : `${left + 12}px`;
          box.style.right = flip ? `${u.width - left + 12}px` : "";
        },
      },
    };
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
          series.push({ spanGaps: true, stroke: faded(stroke, 0.3), width: 0.5, points: { show: false } });
          data.push(edge);
        }
      }
      if (smooth) {
        const bySmooth = new Map(smoothed(c.data[1]).map((v, i) => [c.data[0][i], v]));
        series.push({ ...common, stroke: faded(stroke, curves.length > 2 ? 0.12 : 0.28), width: 1 });
        series.push({ ...common, stroke, width: 2, dash: c.dash });
        data.push(values, joined[0].map((x) => bySmooth.get(x) ?? null));
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

  /** Draw `spec` into `box`; again whenever the width, the theme, the axis or the smoothing changes. */
  function mount(box, spec, getCurves) {
    let plot = null;
    const height = spec.height || 210;
    const draw = () => {
      if (plot) plot.destroy();
      box.replaceChildren();
      box.style.minHeight = `${height}px`;
      const width = box.clientWidth;
      const curves = getCurves();
      if (!width || !curves.length) return;
      const made = spec.stacked ? stack(curves) : lines(spec, curves);
      if (!made.data[0].length) return;
      const format = spec.format || compact;
      const holder = document.createElement("div");
      box.append(holder);
      plot = new uPlot({
        width, height, series: made.series, bands: made.bands, padding: [8, 10, 0, 0], legend: { show: false },
        scales: { x: { time: false }, y: scaleOf(spec) },
        axes: [xAxis(), yAxis(format, spec.log)],
        cursor: { y: false, points: { show: !spec.stacked, size: 7 }, drag: { x: true, y: false }, sync: { key: "x" } },
        plugins: [tooltip(made.entries, format), marker(spec.marks ? spec.marks() : [])],
      }, made.data, holder);
    };
    const chart = { draw, resize: () => (plot && box.clientWidth ? plot.setSize({ width: box.clientWidth, height }) : draw()) };
    live.add(chart);
    new ResizeObserver(() => chart.resize()).observe(box);
    draw();
  }

  const redraw = () => live.forEach((chart) => chart.draw());
  return {
    mount, redraw, compact, duration, percent,
    setAxis: (name) => { axis = name; redraw(); },
    setSmoothing: (on) => { smoothing = on; redraw(); },
  };
})();
