"use strict";
// Values under the pointer, or under the cursor that the arrow keys move. The page is complete without this.
(() => {
  const tip = document.getElementById("tip");
  const scale = (text) => {
    const [low, high, start, end, kind] = text.split(" ");
    return { low: +low, high: +high, start: +start, end: +end, log: kind === "log" };
  };
  const value = (axis, pixel) => {
    const share = (pixel - axis.start) / (axis.end - axis.start);
    if (axis.log) return axis.low * Math.pow(axis.high / axis.low, share);
    return axis.low + share * (axis.high - axis.low);
  };
  const words = (number) => {
    const size = Math.abs(number);
    if (size && size < 0.001) return number.toExponential(1);
    return size >= 1000 ? Math.round(number).toLocaleString("en") : String(+number.toPrecision(3));
  };
  const near = (points, x) => points.reduce((best, each) => (Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best));
  for (const chart of document.querySelectorAll("svg[data-x]")) {
    const x = scale(chart.dataset.x), y = scale(chart.dataset.y);
    const cursor = chart.querySelector(".cursor");
    const curves = [...chart.querySelectorAll("polyline")].reverse().map((line) => ({
      name: line.dataset.name,
      points: line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
    }));
    const stops = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
    let at = -1;
    const show = (pixel) => {
      at = stops.indexOf(near(stops.map((stop) => [stop]), pixel)[0]);
      const stop = stops[at], box = chart.getBoundingClientRect(), zoom = box.width / chart.viewBox.baseVal.width;
      cursor.setAttribute("x1", stop);
      cursor.setAttribute("x2", stop);
      cursor.style.visibility = "visible";
      const lines = curves.map((curve) => `${curve.name} ${words(value(y, near(curve.points, stop)[1]))}`);
      const place = value(x, stop);
      tip.textContent = [`${chart.dataset.xname} ${words(Math.abs(place) > 20 ? Math.round(place) : place)}`, ...lines].join("\n");
      tip.hidden = false;
      const left = box.left + stop * zoom + 12;
      tip.style.left = `${Math.max(4, left + tip.offsetWidth > innerWidth ? left - tip.offsetWidth - 24 : left)}px`;
      tip.style.top = `${Math.max(4, box.top + 8)}px`;
    };
    const hide = () => { tip.hidden = true; cursor.style.visibility = "hidden"; };
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      show(((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width);
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      show(stops[Math.min(stops.length - 1, Math.max(0, at + step))]);
    });
  }
})();
