// Charts of training runs: hides runs, shows values under the pointer, zooms into steps, and sets logarithmic axes. The
// figures with `data-chart` are drawn from the charts in the JSON of `training-data`, in their order. Texts enter the page as text nodes only.
(() => {
  const source = document.getElementById("training-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const UNITS = 1000;
  const hidden = new Set();
  let [from, to] = [0, data.end];

  function svg(tag, properties, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // A number in at most four significant digits, as `number` in charts.rs.
  function number(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e-3 && size < 1e6) {
      const decimals = Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(size))));
      const text = value.toFixed(decimals);
      return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
    }
    const [digits, power] = value.toExponential(3).split("e");
    return digits.replace(/\.?0+$/, "") + "e" + power.replace("+", "");
  }

  function roundStep(extent, parts) {
    const unit = 10 ** Math.floor(Math.log10(extent / parts));
    return [1, 2, 5, 10].map((n) => n * unit).find((step) => extent / step <= parts) || 10 * unit;
  }

  function linearTicks(low, high, parts) {
    const step = roundStep(high - low, parts);
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step && ticks.length < 100; n += 1) ticks.push(n * step);
    return ticks.map((value) => (Math.abs(value) < 1e-9 * step ? 0 : value));
  }

  function ticks(axis, factor) {
    if (axis.log) {
      const [first, last] = [Math.floor(Math.log10(axis.low)), Math.ceil(Math.log10(axis.high))];
      for (const of of [[1, 2, 5], [1, 3], [1]]) {
        let found = [];
        for (let power = first; power <= last; power += 1) for (const n of of) found.push(n * 10 ** power);
        found = found.filter((value) => value >= axis.low * 0.999999 && value <= axis.high * 1.000001);
        if (of.length === 1 && found.length > 6) found = found.filter((_, k) => k % Math.ceil(found.length / 5) === 0);
        if (found.length > 1 && found.length <= 6) return found;
      }
    }
    return linearTicks(axis.low / factor, axis.high / factor, 5).map((value) => value * factor);
  }

  for (const list of data.steps) list.last = list.first.map((step, k) => step + (list.span ? list.span[k] : 0));
  for (const chart of data.charts) for (const line of chart.lines) line.list = data.steps[line.steps];

  // Indices of the points of a line in the range of steps, with one point on either side so that lines reach the edge.
  function shown(line) {
    const { first, last } = line.list;
    let start = 0;
    while (start + 1 < last.length && last[start + 1] < from) start += 1;
    let end = first.length;
    while (end - 1 > start && first[end - 2] > to) end -= 1;
    return [start, end];
  }

  const low = (line, k) => (line.low ? line.low[k] : line.mean[k]);
  const high = (line, k) => (line.high ? line.high[k] : line.mean[k]);

  function axisOf(chart, lines) {
    let [least, most] = [Infinity, -Infinity];
    for (const line of lines) {
      for (let k = 0; k < line.mean.length; k += 1) {
        if (line.list.last[k] < from || line.list.first[k] > to) continue;
        if (!chart.isLog || low(line, k) > 0) least = Math.min(least, low(line, k));
        most = Math.max(most, high(line, k));
      }
    }
    if (most === -Infinity) return { low: 0, high: 1, log: false };
    const log = chart.isLog && most > 0;
    least = Math.min(least, most);
    for (const limit of chart.limits) if (!hidden.has(limit.run) && limit.value <= 4 * most) most = Math.max(most, limit.value);
    if (!log && chart.zero && least >= 0) [least, most] = [0, 1.04 * most];
    else if (!log) {
      const margin = 0.04 * (most - least);
      [least, most] = [least - margin, most + margin];
    }
    if (!(least < most)) {
      if (log) [least, most] = [least / 2, least * 2];
      else if (least === 0) most = 1;
      else [least, most] = [least - 0.1 * Math.abs(least), least + 0.1 * Math.abs(least)];
    }
    return { low: least, high: most, log };
  }

  const height = (axis, value) => {
    if (axis.log) return value > 0 ? Math.log(value / axis.low) / Math.log(axis.high / axis.low) : null;
    return (value - axis.low) / (axis.high - axis.low);
  };
  const across = (step) => (step - from) / (to - from);
  const percent = (part) => (100 * part).toFixed(2) + "%";

  function path(points) {
    return points.map(([x, y], k) => (k ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");
  }

  function draw(chart) {
    const lines = chart.lines.filter((line) => !hidden.has(line.run));
    const axis = axisOf(chart, lines);
    chart.axis = axis;
    const marks = [];
    for (const value of ticks(axis, chart.factor)) {
      const y = percent(1 - height(axis, value));
      marks.push(svg("line", { class: "grid", x1: 0, x2: "100%", y1: y, y2: y }));
      marks.push(svg("text", { x: 0, dx: -8, y, dy: ".32em", "text-anchor": "end" }, number(value / chart.factor)));
    }
    for (const step of linearTicks(from, to, 5).filter((step) => Number.isInteger(step))) {
      marks.push(svg("text", { x: percent(across(step)), y: "100%", dy: 18, "text-anchor": "middle" }, grouped(step)));
    }
    for (const [run, step, name, text] of data.events) {
      if (hidden.has(run) || step < from || step > to) continue;
      const x = percent(across(step));
      marks.push(svg("g", { class: "event r" + run },
        svg("title", {}, data.runs[run] + ", step " + grouped(step) + ": " + name + " " + text),
        svg("line", { x1: x, x2: x, y1: 0, y2: "100%" }),
        svg("rect", { x, y: -8, width: 4, height: 8, transform: "translate(-2 0)" })));
    }
    for (const limit of chart.limits) {
      const part = height(axis, limit.value);
      if (hidden.has(limit.run) || part === null || part > 1 || part < 0) continue;
      const y = percent(1 - part);
      marks.push(svg("line", { class: "limit r" + limit.run, x1: 0, x2: "100%", y1: y, y2: y },
        svg("title", {}, limit.name + " of " + data.runs[limit.run] + ": " + number(limit.value / chart.factor) + " " + chart.unit)));
    }
    const inner = svg("svg", { viewBox: "0 0 " + UNITS + " " + UNITS, preserveAspectRatio: "none" });
    const dots = [];
    for (const line of lines) {
      const [start, end] = shown(line);
      const [upper, lower, middle] = [[], [], []];
      for (let k = start; k < end; k += 1) {
        const y = [low(line, k), line.mean[k], high(line, k)].map((value) => height(axis, value));
        // On a logarithmic axis the range of a point may begin at 0 or below: it is drawn from the lowest value of the axis.
        if (axis.log && y[0] === null) y[0] = 0;
        if (y.includes(null)) continue;
        const part = across((line.list.first[k] + line.list.last[k]) / 2);
        const place = (value) => [UNITS * part, UNITS * (1 - value)];
        lower.unshift(place(y[0]));
        middle.push(place(y[1]));
        upper.push(place(y[2]));
        if (line.marked && part >= 0 && part <= 1) {
          dots.push(svg("circle", { class: "r" + line.run, cx: percent(part), cy: percent(1 - y[1]), r: 3 }));
        }
      }
      if (line.low && upper.length) inner.append(svg("path", { class: "range r" + line.run, d: path(upper.concat(lower)) + "Z" }));
      const dash = line.marked || line.place === 0 ? "" : " d" + ((line.place - 1) % 3 + 1);
      inner.append(svg("path", { class: "line" + dash + " r" + line.run, "data-series": line.series, "data-run": line.run, d: path(middle) }));
    }
    chart.plot.replaceChildren(...marks, inner, ...dots, chart.cursor);
  }

  const drawAll = () => data.charts.forEach(draw);

  // Values at the pointer: for every line the point that is nearest to the step.
  function nearest(line, step) {
    const { first, last } = line.list;
    let best = -1;
    let least = Infinity;
    for (let k = 0; k < first.length; k += 1) {
      const distance = Math.max(first[k] - step, step - last[k], 0);
      if (last[k] >= from && first[k] <= to && distance < least) [best, least] = [k, distance];
    }
    return best;
  }

  function tell(chart, step) {
    const rows = [];
    let at = null;
    for (const line of chart.lines.filter((line) => !hidden.has(line.run))) {
      const k = nearest(line, step);
      if (k < 0) continue;
      const { first, last } = line.list;
      // The line whose point is nearest names the steps; the others state theirs if they differ.
      const range = first[k] === last[k] ? grouped(first[k]) : grouped(first[k]) + " to " + grouped(last[k]);
      at = at === null || Math.abs(first[k] - step) < Math.abs(at[1] - step) ? [range, first[k]] : at;
      rows.push({ line, k, range });
    }
    const items = rows.map(({ line, k, range }) => {
      const unit = chart.unit ? " " + chart.unit : "";
      let text = number(line.mean[k] / chart.factor) + unit;
      if (line.low && line.low[k] < line.high[k]) {
        text += " (" + number(line.low[k] / chart.factor) + " to " + number(line.high[k] / chart.factor) + ")";
      }
      const names = [data.runs.length > 1 ? data.runs[line.run] : null, line.series, range === at[0] ? null : "step " + range];
      const swatch = svg("svg", { "aria-hidden": "true" }, svg("rect", { class: "r" + line.run, width: "100%", height: "100%" }));
      return element("p", { "data-run": line.run, "data-series": line.series }, swatch, names.filter(Boolean).join(", ") + ": ", element("b", {}, text));
    });
    chart.tip.replaceChildren(element("strong", {}, at ? (at[0].includes("to") ? "steps " : "step ") + at[0] : "no value"),
      element("div", { class: "key" }, ...items));
    chart.tip.hidden = false;
    const x = at === null ? null : percent(Math.min(1, Math.max(0, across(at[1]))));
    chart.cursor.replaceChildren(...(x === null ? [] : [svg("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: "100%" })]));
  }

  function place(chart, event) {
    const box = chart.figure.getBoundingClientRect();
    const x = event.clientX - box.left;
    const width = chart.tip.offsetWidth;
    chart.tip.style.left = Math.max(0, x + 14 + width > box.width ? x - width - 14 : x + 14) + "px";
    chart.tip.style.top = event.clientY - box.top + 14 + "px";
  }

  function zoom(first, last) {
    const [a, b] = [Math.max(0, Math.round(first)), Math.min(data.end, Math.round(last))];
    [from, to] = a < b ? [a, b] : [0, data.end];
    fields.forEach((field, k) => { field.value = String([from, to][k]); });
    all.disabled = from === 0 && to === data.end;
    drawAll();
  }

  // Hiding runs.
  const list = document.getElementById("training-runs");
  if (data.runs.length > 1) {
    for (const item of list.children) {
      const run = Number(item.dataset.run);
      const box = element("input", { type: "checkbox", checked: true, "data-run": run, onchange: () => {
        if (box.checked) hidden.delete(run);
        else hidden.add(run);
        drawAll();
      } });
      item.replaceChildren(element("label", {}, box, ...item.childNodes));
    }
  }

  // The range of steps.
  const controls = document.getElementById("training-controls");
  const fields = ["First step", "Last step"].map((name, k) => element("input", {
    inputmode: "numeric", "aria-label": name, "data-step": k ? "last" : "first", onchange: () => {
      const [a, b] = fields.map((field) => Number(field.value));
      zoom(Number.isFinite(a) ? a : 0, Number.isFinite(b) ? b : data.end);
    },
  }));
  const all = element("button", { type: "button", "data-action": "all-steps", onclick: () => zoom(0, data.end) }, "All steps");
  controls.append(element("fieldset", {}, element("legend", {}, "Steps (or drag over a chart)"), element("div", {}, fields[0], "to", fields[1], all)));

  const figures = document.querySelectorAll("[data-chart]");
  for (const [place, chart] of data.charts.entries()) {
    chart.figure = figures[place];
    chart.plot = chart.figure.querySelector("svg.plot");
    chart.cursor = svg("g", {});
    chart.tip = element("div", { class: "tip", hidden: true });
    chart.isLog = false;
    chart.figure.append(chart.tip);
    if (chart.log) {
      const box = element("input", { type: "checkbox", "data-log": chart.id, onchange: () => {
        chart.isLog = box.checked;
        draw(chart);
      } });
      chart.figure.querySelector("figcaption p").append(element("label", {}, box, "logarithmic"));
    }
    const stepUnder = (event) => {
      const box = chart.plot.getBoundingClientRect();
      return from + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (to - from);
    };
    let pressed = null;
    chart.plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      pressed = stepUnder(event);
      chart.plot.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    chart.plot.addEventListener("pointermove", (event) => {
      const step = stepUnder(event);
      tell(chart, step);
      place(chart, event);
      if (pressed !== null) {
        const [a, b] = [pressed, step].sort((a, b) => a - b).map(across);
        chart.cursor.append(svg("rect", { class: "selection", x: percent(a), y: 0, width: percent(b - a), height: "100%" }));
      }
    });
    chart.plot.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const [a, b] = [pressed, stepUnder(event)].sort((a, b) => a - b);
      pressed = null;
      // A click without a movement is no selection.
      if (across(b) - across(a) > 0.01) zoom(a, b);
    });
    chart.plot.addEventListener("pointercancel", () => { pressed = null; });
    chart.plot.addEventListener("dblclick", () => zoom(0, data.end));
    chart.plot.addEventListener("pointerleave", () => {
      if (pressed !== null) return;
      chart.tip.hidden = true;
      chart.cursor.replaceChildren();
    });
  }
  zoom(0, data.end);
})();
