"use strict";
// Draws the charts with uPlot. Legends show the values under the pointer, or under the cursor moved by the arrow keys.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const words = (number) => {
    const size = Math.abs(number);
    if (size && size < 0.001) return number.toExponential(1);
    if (size >= 10000) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(number);
    return size >= 1000 ? Math.round(number).toLocaleString("en") : String(+number.toPrecision(3));
  };
  const axis = (more) => ({
    stroke: () => color("quiet"), font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 14, labelGap: 0, gap: 4, ticks: { show: false },
    grid: { stroke: () => color("line"), width: 1 }, values: (u, splits) => splits.map((each) => (each === null ? "" : words(each))), ...more,
  });
  const powersOnly = (u, splits) => splits.map((each) => (each && Math.abs(Math.log10(each) - Math.round(Math.log10(each))) < 1e-6 ? each : null));
  const powers = {
    filter: powersOnly, grid: { stroke: () => color("line"), width: 1, filter: powersOnly },
    values: (u, splits) => splits.map((each) => (each === null ? "" : each.toExponential(0))),
  };
  // curves of a chart are joined by x: show the value of each curve at its point nearest to the pointer
  const nearest = (u, series, at) => {
    for (let far = 0; far < u.data[0].length; far++)
      for (const each of [at - far, at + far]) if (u.data[series][each] != null) return each;
    return at;
  };
  const kinds = {
    lines: (plot) => ({
      data: uPlot.join(plot.series.map((each) => each.points)),
      series: plot.series.map((each) => ({
        scale: each.scale, stroke: () => color(each.color), width: each.color === "bound" ? 1 : 1.6, dash: each.color === "bound" ? [4, 3] : [],
        spanGaps: true, points: { show: each.dots, size: 5, fill: () => color(each.color) },
      })),
      scales: {
        x: { time: false },
        right: { range: { min: { pad: 0.1, soft: 0, mode: 1 }, max: { pad: 0.1 } } },
        y: plot.log ? { distr: 3 } : { range: { min: { pad: 0.1, soft: plot.floor ?? 0, mode: plot.floor === null ? 3 : 1 }, max: { pad: 0.1, soft: plot.ceiling ?? 0, mode: plot.ceiling === null ? 0 : 1 } } },
      },
      axes: [axis({ size: 22, label: plot.x }), axis({ size: 46, ...(plot.log ? powers : {}) }), axis({ scale: "right", side: 1, size: 40, grid: { show: false }, show: plot.series.some((each) => each.scale === "right") })],
      name: (u, at) => `${plot.x} ${words(u.data[0][at])}`,
    }),
    bars: (plot) => ({
      data: plot.series[0].points,
      series: [{ fill: () => color(plot.series[0].color), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 26] }) }],
      scales: { x: { time: false, range: [-0.7, plot.series[0].points[0].length - 0.3] }, y: { range: (u, low, high) => [0, 1.08 * (high || 1)] } },
      axes: [axis({ size: 22, label: plot.x, incrs: [1, 2, 4, 8, 16, 32], space: 44, grid: { show: false } }), axis({ size: 46 })],
      name: (u, at) => `${at} ${plot.x}`,
    }),
    lanes: (plot) => ({
      data: [plot.span, [null, null]],
      series: [{}],
      scales: { x: { time: false }, y: { range: [0, plot.lanes.length], dir: -1 } },
      axes: [
        axis({ size: 22, space: 80, values: (u, splits) => splits.map((each) => `${each} s`) }),
        axis({ size: 76, grid: { show: false }, splits: () => plot.lanes.map((_, lane) => lane + 0.5), values: () => plot.lanes }),
      ],
      height: 22 * plot.lanes.length + 30,
      draw: (u) => {
        const { ctx, bbox } = u, high = bbox.height / plot.lanes.length;
        ctx.save();
        ctx.beginPath();
        ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
        ctx.clip();
        for (const [lane, kind, start, end] of plot.marks) {
          const left = u.valToPos(start, "x", true), width = Math.max(1, u.valToPos(end, "x", true) - left);
          // pauses are short: draw them on the lower edge, over the span that they interrupt
          const top = bbox.top + high * (lane + (kind === "update" ? 0.6 : 0.12)), tall = high * (kind === "update" ? 0.28 : 0.76);
          ctx.fillStyle = color(kind);
          ctx.fillRect(left, top, width, tall);
        }
        ctx.restore();
      },
      name: (u) => {
        const x = u.posToVal(u.cursor.left, "x"), lane = Math.floor(u.posToVal(u.cursor.top, "y"));
        return plot.marks.findLast((each) => each[0] === lane && each[2] <= x && x <= each[3])?.[4] ?? `${words(x)} s`;
      },
    }),
  };
  const drawn = [...document.querySelectorAll(".plot")].map((place) => {
    const plot = plots[place.dataset.plot], kind = kinds[plot.kind](plot), figure = place.closest("figure");
    const output = figure.querySelector("output"), numbers = plot.kind === "lanes" ? [] : [...figure.querySelectorAll(".legend b")];
    const atRest = numbers.map((each) => each.textContent);
    const show = (u) => {
      const at = u.cursor.left < 0 ? null : u.cursor.idx;
      output.textContent = at == null ? "" : kind.name(u, at);
      numbers.forEach((each, place) => { each.textContent = at == null ? atRest[place] : words(u.data[place + 1][u.cursor.idxs[place + 1]]); });
    };
    const size = () => ({ width: place.clientWidth, height: kind.height ?? 200 });
    const u = new uPlot({
      ...size(), series: [{}, ...kind.series], scales: kind.scales, axes: kind.axes, legend: { show: false }, padding: [8, 22, 0, 0],
      cursor: { y: false, dataIdx: (u, series, at) => (series && plot.kind === "lines" ? nearest(u, series, at) : at), points: { size: 6 } },
      hooks: { setCursor: [show], draw: kind.draw ? [kind.draw] : [] },
    }, kind.data, place);
    place.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") u.setCursor({ left: -10, top: -10 });
      if (!step) return;
      event.preventDefault();
      const before = u.cursor.left < 0 ? -1 : u.cursor.idx ?? -1, at = Math.min(u.data[0].length - 1, Math.max(0, before + step));
      u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: 10 });
    });
    place.addEventListener("blur", () => u.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => u.setSize(size())).observe(place);
    return u;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((u) => u.redraw()));
})();
