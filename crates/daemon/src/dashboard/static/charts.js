// Charts of the last hour. Each element .plot says where its data is and which columns it shows.
(() => {
  "use strict";
  const PERIOD_MS = 5000;
  const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5"];
  const plots = [...document.querySelectorAll(".plot")].map((element) => ({
    element,
    source: element.dataset.source,
    columns: element.dataset.columns.split(","),
    labels: element.dataset.labels.split(","),
    unit: element.dataset.unit,
    stacked: "stacked" in element.dataset,
    chart: null,
    data: null,
  }));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function shown(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === "bytes") {
      const units = ["B", "KiB", "MiB", "GiB", "TiB"];
      let at = 0;
      while (value >= 1000 && at < units.length - 1) { value /= 1024; at += 1; }
      return `${Number(value.toPrecision(3))} ${units[at]}`;
    }
    if (unit === "ms") {
      if (value === 0) return "0";
      if (value < 1) return `${Number((value * 1000).toPrecision(3))} µs`;
      if (value >= 1000) return `${Number((value / 1000).toPrecision(3))} s`;
      return `${Number(value.toPrecision(3))} ms`;
    }
    return String(Number(value.toPrecision(3)));
  }

  // Values of each series, and what is drawn: sums of those below where they are stacked.
  function dataOf(plot, history) {
    const times = history.times_ms.map((ms) => ms / 1000);
    const raw = plot.columns.map((name) => {
      const at = history.columns.indexOf(name);
      return at < 0 ? times.map(() => null) : history.values[at];
    });
    if (!plot.stacked) return { raw, drawn: [times, ...raw] };
    const sums = times.map(() => 0);
    const drawn = raw.map((values) => values.map((value, index) => (sums[index] += value ?? 0)));
    return { raw, drawn: [times, ...drawn] };
  }

  function options(plot) {
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--quiet"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = plot.columns.map((_, index) => {
      const stroke = colour(PALETTE[index % PALETTE.length]);
      return {
        label: plot.labels[index], stroke, width: 1.5, points: { show: false },
        spanGaps: !plot.stacked,
        fill: plot.stacked ? stroke + (plot.columns.length > 1 ? "44" : "22") : undefined,
        value: (_, __, ___, at) => shown(at === null ? last(plot, index) : plot.data.raw[index][at], plot.unit),
      };
    });
    const bands = plot.stacked
      ? plot.columns.slice(1).map((_, index) => ({ series: [index + 2, index + 1] }))
      : [];
    return {
      width: plot.element.clientWidth, height: 170, padding: [8, 8, 0, 0],
      cursor: { points: { size: 5 }, y: false, drag: { x: false, y: false } },
      legend: { live: true },
      scales: { y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] } },
      axes: [
        { ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map((at) => new Date(at * 1000).toTimeString().slice(0, ticks[1] - ticks[0] < 60 ? 8 : 5)) },
        { ...axis, size: 58, space: 34, values: (_, ticks) => ticks.map((value) => shown(value, plot.unit)) },
      ],
      series: [{ label: "at", value: (_, at) => (at ? new Date(at * 1000).toTimeString().slice(0, 8) : "now") }, ...series],
      bands,
    };
  }

  function last(plot, index) {
    const values = plot.data.raw[index];
    return values.length ? values[values.length - 1] : null;
  }

  function draw(plot) {
    plot.chart?.destroy();
    plot.chart = new uPlot(options(plot), plot.data.drawn, plot.element);
  }

  async function refresh() {
    if (document.hidden) return;
    for (const source of new Set(plots.map((plot) => plot.source))) {
      let history;
      try {
        const answer = await fetch(source, { headers: { accept: "application/json" } });
        if (!answer.ok) continue;
        history = await answer.json();
      } catch { continue; }
      for (const plot of plots.filter((one) => one.source === source)) {
        plot.element.classList.toggle("empty", history.times_ms.length < 2);
        plot.data = dataOf(plot, history);
        if (plot.chart) plot.chart.setData(plot.data.drawn); else draw(plot);
      }
    }
    document.documentElement.dataset.charts = "drawn";
  }

  const redraw = () => plots.filter((plot) => plot.data).forEach(draw);
  document.addEventListener("thaw:theme", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => {
    for (const plot of plots) {
      if (plot.chart && plot.chart.width !== plot.element.clientWidth) plot.chart.setSize({ width: plot.element.clientWidth, height: 170 });
    }
  }).observe(document.querySelector(".charts"));
  refresh();
  setInterval(refresh, PERIOD_MS);
})();
