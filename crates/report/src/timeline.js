// Timelines: bytes over the instructions of a step, and the tensors at their addresses. Every element with
// `data-timeline="ID"` is filled from the JSON in the element ID. Texts enter the page as text nodes only.
(() => {
  const MOST_BANDS = 24;
  const GAPS = "free below the highest address";
  // Lines of the ledger that most plans have keep their colours; the others take those that are left.
  const COLORS = { "params": 0, "streamed params": 9, "gradients": 4, "master weights": 11, "optimizer": 5, "inputs": 8, "outputs": 2,
    "activations": 1, "activation gradients": 10, "workspace": 7 };
  const OTHERS = [3, 6, 9, 2, 8];
  const STACK = 280;
  const STRIP = 34;
  const MAP = 260;
  const LEFT = 64;
  const RIGHT = 10;
  const root = document.getElementById("timeline-controls");
  const figures = [...document.querySelectorAll("[data-timeline]")];
  if (!root || figures.length === 0) return;

  function short(bytes) {
    for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (bytes >= unit) {
        const number = bytes / unit;
        return number.toFixed(number < 10 ? 2 : number < 100 ? 1 : 0) + "\u00a0" + name;
      }
    }
    return bytes + "\u00a0B";
  }

  function swatch(fill) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("aria-hidden", "true");
    const mark = document.createElementNS(SVG, "rect");
    for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill })) mark.setAttribute(name, value);
    svg.append(mark);
    return svg;
  }

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Undoes the packing of the data: see `data` in timeline.rs.
  function read(data) {
    const named = (name, number) => data.names[name].replace("\u0001", String(number));
    const unrun = (column) => {
      const all = [];
      for (const item of column) {
        if (Array.isArray(item)) for (let k = 0; k < item[1]; k += 1) all.push(item[0]);
        else all.push(item);
      }
      return all;
    };
    const summed = (column) => {
      let sum = 0;
      return column.map((distance) => (sum += distance));
    };
    const phaseOf = (phase) => (phase < 0 ? null : data.phases[phase]);
    const [labels, labelNumbers, labelLayers, phases, kernels, times] = data.instructions.map(unrun);
    const [numbers, layers] = [summed(labelNumbers), summed(labelLayers)];
    const count = labels.length;
    const instructions = labels.map((label, i) => ({
      label: named(label, numbers[i]), layer: layers[i], phase: phaseOf(phases[i]),
      kernel: kernels[i] < 0 ? null : data.kernels[kernels[i]], seconds: data.times[times[i]] / 1e9,
    }));
    const [names, nameNumbers, nameLayers, when, lines, births, lives, distances, sizes] = data.tensors.map(unrun);
    const [ofName, of, birth] = [nameNumbers, nameLayers, births].map(summed);
    let end = 0;
    const tensors = names.map((name, k) => {
      const bytes = data.sizes[sizes[k]];
      const at = end + distances[k];
      end = at + Math.ceil(bytes / data.alignment);
      return {
        name: named(name, ofName[k]), layer: of[k], phase: phaseOf(when[k]), line: data.lines[lines[k]], birth: birth[k],
        death: lives[k] < 0 ? count - 1 : birth[k] + lives[k], whole: lives[k] < 0, address: at * data.alignment, bytes,
      };
    });
    if (data.measured) data.measured.times.forEach((time, i) => { instructions[i].measured = time === null ? null : time / 1e9; });
    return { ...data, instructions, tensors, count };
  }

  // Positions of the instructions on an axis, scaled to the number of instructions: an instruction i reaches from
  // positions[i] to positions[i + 1]. An axis of time gives each instruction the width of its time.
  function positions(t, axis) {
    const all = new Float64Array(t.count + 1);
    for (let i = 0; i < t.count; i += 1) {
      const { seconds, measured } = t.instructions[i];
      all[i + 1] = all[i] + (axis === "expected" ? seconds : axis === "measured" ? measured || 0 : 1);
    }
    const total = all[t.count];
    if (total <= 0) return { all: Float64Array.from(all, (_, i) => i), total: 0 };
    for (let i = 0; i <= t.count; i += 1) all[i] *= t.count / total;
    return { all, total: axis === "instructions" ? 0 : total };
  }

  const clock = (seconds) => {
    const [number, unit] = seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [1e3 * seconds, "ms"] : [1e6 * seconds, "µs"];
    return Number(number.toPrecision(3)) + "\u00a0" + unit;
  };

  // Bytes of every band at every instruction. A band is a line of the ledger, or a range of layers.
  function bands(t, byLayer) {
    const { count } = t;
    const most = t.tensors.reduce((most, tensor) => Math.max(most, tensor.layer), -1);
    const width = Math.max(1, Math.ceil((most + 1) / MOST_BANDS));
    const names = t.outside.map(([label]) => label);
    const band = new Map(names.map((name, k) => [name, k]));
    const bandOf = (name) => {
      if (!band.has(name)) {
        band.set(name, names.length);
        names.push(name);
      }
      return band.get(name);
    };
    const layerName = (layer) => {
      if (layer < 0) return "no layer";
      const first = Math.floor(layer / width) * width;
      const last = Math.min(first + width - 1, most);
      return first === last ? "layer " + first : "layers " + first + " to " + last;
    };
    if (byLayer) {
      bandOf("no layer");
      for (let layer = 0; layer <= most; layer += width) bandOf(layerName(layer));
    }
    t.tensors.forEach((tensor) => { tensor.band = bandOf(byLayer ? layerName(tensor.layer) : tensor.line); });
    const rows = names.map(() => new Float64Array(count + 1));
    t.outside.forEach(([, bytes], k) => { rows[k][0] += bytes; });
    const top = new Float64Array(count).fill(t.lasting);
    for (const tensor of t.tensors) {
      rows[tensor.band][tensor.birth] += tensor.bytes;
      rows[tensor.band][tensor.death + 1] -= tensor.bytes;
      if (!tensor.whole) {
        const end = Math.ceil((tensor.address + tensor.bytes) / t.alignment) * t.alignment;
        for (let i = tensor.birth; i <= tensor.death; i += 1) if (top[i] < end) top[i] = end;
      }
    }
    const total = new Float64Array(count);
    const outside = t.outside.reduce((sum, [, bytes]) => sum + bytes, 0);
    for (const row of rows) {
      for (let i = 0; i < count; i += 1) {
        if (i > 0) row[i] += row[i - 1];
        total[i] += row[i];
      }
    }
    // Bytes below the highest address in use that hold no tensor: at the peak, padding and packing.
    const padding = top.map((end, i) => Math.max(0, end + outside - total[i]));
    if (padding.some((bytes) => bytes > 0)) {
      names.push(GAPS);
      rows.push(padding);
      padding.forEach((bytes, i) => { total[i] += bytes; });
    }
    return { names, rows, total, isLayers: byLayer, first: t.outside.length };
  }

  function bandColor(bands, k) {
    const name = bands.names[k];
    if (name === GAPS) return color("free");
    if (k < bands.first) return color("outside" + (k % 2));
    if (!bands.isLayers) return color("t" + (name in COLORS ? COLORS[name] : OTHERS[k % OTHERS.length]));
    if (k === bands.first) return color("t11");
    const share = (k - bands.first - 1) / Math.max(1, bands.names.length - bands.first - 2);
    return "hsl(" + Math.round(205 - 175 * share) + " 38% " + (k % 2 ? 56 : 50) + "%)";
  }

  // Steps of an axis: 1, 2 or 5 times a power of ten.
  function ticks(from, to, most) {
    const rough = (to - from) / most || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((step) => step >= rough);
    const all = [];
    for (let at = Math.ceil(from / step) * step; at <= to * (1 + 1e-9); at += step) all.push(at);
    return all;
  }

  const state = { byLayer: false, search: "", whole: false, axis: "instructions" };
  const all = figures.map((figure) => build(figure, read(JSON.parse(document.getElementById(figure.dataset.timeline).textContent))));
  const scale = () => Math.max(...all.map((chart) => Math.max(chart.t.peak, chart.measuredPeak, chart.limit || 0)));
  // A budget far above the peak would press the chart flat: it is then a text, not a line.
  const peaks = () => Math.max(...all.map((chart) => Math.max(chart.t.peak, chart.measuredPeak)));
  const range = () => (scale() > 3 * peaks() ? peaks() : scale()) * 1.06;

  function build(figure, t) {
    const canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": label(t) });
    const tip = element("div", { class: "tip", hidden: true });
    const legend = element("ul", { class: "swatches" });
    const readout = element("p", { class: "readout", role: "status" });
    figure.append(canvas, tip, legend, readout);
    const chart = { t, from: 0, to: t.count, drag: null, pinned: null, width: 0, bands: null, limit: t.budget === null ? null : t.budget - t.process };
    const memory = t.measured ? t.measured.memory : [];
    chart.measuredPeak = Math.max(0, ...memory.flatMap(([, bytes]) => bytes.map(([, at]) => at)));

    // Places on the axis; `chart.from` and `chart.to` are the ends of the shown part.
    const placeOf = (i) => {
      const whole = Math.min(t.count, Math.floor(i));
      const { all } = chart.positions;
      return all[whole] + (i - whole) * (whole < t.count ? all[whole + 1] - all[whole] : 0);
    };
    const xOf = (i) => LEFT + (placeOf(i) - chart.from) / (chart.to - chart.from) * (chart.width - LEFT - RIGHT);
    const atX = (x) => chart.from + (x - LEFT) / (chart.width - LEFT - RIGHT) * (chart.to - chart.from);
    // The last instruction that begins at the place or before it.
    const instructionAt = (x) => {
      const [place, { all }] = [atX(x), chart.positions];
      let [low, high] = [0, t.count - 1];
      while (low < high) {
        const middle = Math.ceil((low + high) / 2);
        if (all[middle] <= place) low = middle;
        else high = middle - 1;
      }
      return low;
    };
    chart.axis = () => {
      chart.positions = positions(t, state.axis);
      [chart.from, chart.to] = [0, t.count];
    };
    chart.axis();
    chart.around = (i, half) => [placeOf(i) - half, placeOf(i) + half];
    const mapTop = 22 + STACK + STRIP + 40;

    // The addresses that the map shows: all of the arena, or only those of tensors that come and go.
    const low = () => (state.whole || t.lasting === t.arena ? 0 : t.lasting);
    const yOfAddress = (address) => mapTop + MAP - (address - low()) / Math.max(1, t.arena - low()) * MAP;

    chart.recompute = () => {
      chart.bands = bands(t, state.byLayer);
      const { names } = chart.bands;
      legend.replaceChildren(...names.map((name, k) => {
        return element("li", {}, swatch(bandColor(chart.bands, k)), name);
      }));
    };

    chart.found = () => {
      const wanted = state.search.trim().toLowerCase();
      return wanted ? t.tensors.filter((tensor) => tensor.name.toLowerCase().includes(wanted)) : [];
    };

    chart.draw = () => {
      chart.width = figure.clientWidth;
      const height = mapTop + MAP + 22;
      const ratio = window.devicePixelRatio || 1;
      canvas.width = Math.round(chart.width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
      const c = canvas.getContext("2d");
      c.scale(ratio, ratio);
      c.font = "12px system-ui, sans-serif";
      const [fg, muted, line, bg] = ["fg", "muted", "line", "bg"].map(color);
      const right = chart.width - RIGHT;
      const most = range();
      const y = (bytes) => 22 + STACK - bytes / most * STACK;
      const { rows, total } = chart.bands;
      const colors = rows.map((_, k) => bandColor(chart.bands, k));

      c.textBaseline = "middle";
      c.textAlign = "right";
      for (const bytes of ticks(0, most, 5)) {
        c.fillStyle = line;
        c.fillRect(LEFT, Math.round(y(bytes)), right - LEFT, 1);
        c.fillStyle = muted;
        c.fillText(bytes ? short(bytes) : "0", LEFT - 8, y(bytes));
      }

      // Each column of pixels shows the instruction with the most bytes that falls into it, so that no peak is lost.
      for (let x = LEFT; x < right; x += 1) {
        const first = instructionAt(x);
        // The instruction at the next column belongs to that column; the last instruction has none after it.
        const next = state.axis === "instructions" && atX(x + 1) < t.count ? 1 : 0;
        const last = Math.max(first, instructionAt(x + 1) - next);
        let at = first;
        for (let i = first; i <= last; i += 1) if (total[i] > total[at]) at = i;
        let sum = 0;
        for (let k = 0; k < rows.length; k += 1) {
          const bytes = rows[k][at];
          if (bytes <= 0) continue;
          const [bottom, top] = [y(sum), y(sum + bytes)];
          c.fillStyle = colors[k];
          c.fillRect(x, top, 1, bottom - top);
          sum += bytes;
        }
      }

      // Phases, and the plans of the step.
      const strip = 22 + STACK + 6;
      let begin = instructionAt(LEFT);
      const end = Math.min(t.count, instructionAt(right) + 1);
      for (let i = begin; i <= end; i += 1) {
        if (i === end || t.instructions[i].phase !== t.instructions[begin].phase) {
          if (i > begin) {
            const [a, b] = [Math.max(LEFT, xOf(begin)), Math.min(right, xOf(i))];
            c.fillStyle = color(t.instructions[begin].phase);
            c.fillRect(a, strip, Math.max(b - a, 0.5), 10);
          }
          begin = i;
        }
      }
      c.textBaseline = "alphabetic";
      for (const [name, first, count] of t.plans) {
        const [a, b] = [Math.max(LEFT, xOf(first)), Math.min(right, xOf(first + count))];
        if (b <= a) continue;
        c.fillStyle = color("strong-line");
        if (placeOf(first) > chart.from) c.fillRect(Math.round(a), 14, 1, mapTop + MAP - 14);
        c.fillStyle = muted;
        c.textAlign = "left";
        if (t.plans.length > 1 && c.measureText(name).width < b - a - 8) c.fillText(name, a + 4, 12);
      }
      c.fillStyle = muted;
      c.textAlign = "center";
      const count = Math.max(2, Math.floor((right - LEFT) / 90));
      if (chart.positions.total > 0) {
        const seconds = chart.positions.total / t.count;
        for (const at of ticks(chart.from * seconds, chart.to * seconds, count)) {
          const x = LEFT + (at / seconds - chart.from) / (chart.to - chart.from) * (right - LEFT);
          c.fillText(clock(at), Math.min(right - 16, x), strip + 26);
        }
      } else {
        for (const i of ticks(chart.from, chart.to, count).filter((i) => Number.isInteger(i) && i < t.count)) {
          c.fillText(grouped(i), Math.min(right - 12, xOf(i + 0.5)), strip + 26);
        }
      }

      // Measured memory, as steps: a reading holds until the next.
      memory.forEach(([name, bytes], k) => {
        c.strokeStyle = fg;
        c.lineWidth = 1.5;
        c.setLineDash(k ? [2, 3] : []);
        c.save();
        c.beginPath();
        c.rect(LEFT, 0, right - LEFT, 22 + STACK);
        c.clip();
        c.beginPath();
        bytes.forEach(([i, at], n) => {
          if (n === 0) c.moveTo(xOf(i), y(at));
          else c.lineTo(xOf(i), y(bytes[n - 1][1]));
          c.lineTo(xOf(i), y(at));
        });
        if (bytes.length > 0) c.lineTo(xOf(bytes[bytes.length - 1][0] + 1), y(bytes[bytes.length - 1][1]));
        c.stroke();
        c.restore();
        c.setLineDash([]);
        if (bytes.length > 0) {
          c.textAlign = "left";
          halo(c, name, LEFT + 6, Math.max(34, y(bytes[0][1]) - 6) + 14 * k, fg, bg);
        }
      });

      // Budget and peak.
      c.textAlign = "left";
      if (chart.limit !== null && chart.limit <= most) {
        c.strokeStyle = fg;
        c.lineWidth = 1;
        c.setLineDash([5, 4]);
        c.beginPath();
        c.moveTo(LEFT, y(chart.limit));
        c.lineTo(right, y(chart.limit));
        c.stroke();
        c.setLineDash([]);
        halo(c, "budget " + short(chart.limit), LEFT + 6, y(chart.limit) - 5, fg, bg);
      }
      if (placeOf(t.peakAt + 0.5) >= chart.from && placeOf(t.peakAt + 0.5) < chart.to) {
        const [px, py] = [xOf(t.peakAt + 0.5), y(t.peak)];
        c.fillStyle = color("peak");
        c.beginPath();
        c.arc(px, py, 4, 0, 7);
        c.fill();
        const text = "peak " + short(t.peak);
        const after = px + 8 + c.measureText(text).width < right;
        c.textAlign = after ? "left" : "right";
        // Below the point where the line of the budget would cross the text.
        const above = Math.max(18, py - 6);
        const crossed = chart.limit !== null && Math.abs(y(chart.limit) - above + 4) < 18;
        halo(c, text, after ? px + 8 : px - 8, crossed ? py + 16 : above, color("peak"), bg);
      }

      // Addresses.
      c.textAlign = "left";
      c.fillStyle = muted;
      const heading = "Tensors at their addresses";
      const more = heading + (low() ? ", above those that live for the whole run" : "");
      c.fillText(c.measureText(more).width < right - LEFT ? more : heading, LEFT, mapTop - 8);
      c.strokeStyle = line;
      c.lineWidth = 1;
      c.strokeRect(LEFT + 0.5, mapTop + 0.5, right - LEFT - 1, MAP - 1);
      c.textAlign = "right";
      c.textBaseline = "middle";
      for (const address of ticks(low(), t.arena, 4)) {
        c.fillStyle = line;
        c.fillRect(LEFT - 4, Math.round(yOfAddress(address)), 4, 1);
        c.fillStyle = muted;
        c.fillText(address ? short(address) : "0", LEFT - 8, yOfAddress(address));
      }
      c.save();
      c.beginPath();
      c.rect(LEFT, mapTop, right - LEFT, MAP);
      c.clip();
      const found = new Set(chart.found());
      const box = (tensor) => {
        const [a, b] = [xOf(tensor.birth), xOf(tensor.death + 1)];
        const [top, bottom] = [yOfAddress(tensor.address + tensor.bytes), yOfAddress(tensor.address)];
        return [a, top, Math.max(b - a, 0.5), Math.max(bottom - top, 0.25)];
      };
      for (const tensor of t.tensors) {
        if (placeOf(tensor.death + 1) < chart.from || placeOf(tensor.birth) > chart.to) continue;
        const [a, top, w, h] = box(tensor);
        c.globalAlpha = found.size > 0 && !found.has(tensor) ? 0.25 : 1;
        c.fillStyle = colors[tensor.band];
        c.fillRect(a, top, w, h);
        if (w > 4 && h > 4) {
          c.strokeStyle = bg;
          c.lineWidth = 0.5;
          c.strokeRect(a, top, w, h);
        }
      }
      c.globalAlpha = 1;
      c.strokeStyle = fg;
      c.lineWidth = 1.5;
      for (const tensor of found) c.strokeRect(...box(tensor));
      if (chart.pinned && chart.pinned.tensor) {
        c.lineWidth = 2;
        c.strokeRect(...box(chart.pinned.tensor));
      }
      c.restore();
      if (chart.drag) {
        const [a, b] = [chart.drag.from, chart.drag.to].sort((p, q) => p - q);
        c.fillStyle = fg;
        c.globalAlpha = 0.12;
        c.fillRect(a, 22, b - a, mapTop + MAP - 22);
        c.globalAlpha = 1;
      }
      status();
    };

    function halo(c, text, x, y, ink, paper) {
      c.lineWidth = 4;
      c.lineJoin = "round";
      c.strokeStyle = paper;
      c.strokeText(text, x, y);
      c.fillStyle = ink;
      c.fillText(text, x, y);
    }

    function label(t) {
      return "Memory of " + t.title + " over " + t.count + " instructions; peak " + short(t.peak) + " at instruction " + t.peakAt + ", " + t.instructions[t.peakAt].label;
    }

    function status() {
      const found = chart.found();
      const bold = (text) => element("b", {}, text);
      const parts = ["Peak ", bold(grouped(t.peak) + " B"), " at instruction " + grouped(t.peakAt) + ", " + t.instructions[t.peakAt].label + ". "];
      if (chart.limit !== null && chart.limit > range()) parts.push("The budget of " + short(chart.limit) + " is above the chart. ");
      if (chart.limit !== null && t.process > 0) parts.push("The budget line is the budget without the " + short(t.process) + " of the process. ");
      if (state.search.trim()) parts.push(bold(grouped(found.length) + (found.length === 1 ? " tensor" : " tensors")), " match, " + short(found.reduce((sum, tensor) => sum + tensor.bytes, 0)) + ". ");
      if (found.length > 0) {
        const largest = found.reduce((a, b) => (b.bytes > a.bytes ? b : a));
        const life = largest.whole ? "during the whole run" : "from instruction " + grouped(largest.birth) + " to " + grouped(largest.death);
        parts.push("The largest is " + largest.name + ", " + short(largest.bytes) + " at 0x" + largest.address.toString(16) + " " + life + ". ");
      }
      for (const [name, bytes] of memory) {
        parts.push("The " + name + ": at most ", bold(short(Math.max(...bytes.map(([, at]) => at)))), ". ");
      }
      if (chart.from > 0 || chart.to < t.count) {
        parts.push("Shown: instructions " + grouped(instructionAt(LEFT)) + " to " + grouped(instructionAt(chart.width - RIGHT - 0.5)) + ". ");
      }
      readout.replaceChildren(...parts);
    }

    // The tensor at a point of the map, or the instruction and the band at a point of the stack.
    function at(x, y) {
      if (x < LEFT || x > chart.width - RIGHT) return null;
      const i = instructionAt(x);
      if (y >= mapTop && y <= mapTop + MAP) {
        const address = low() + (mapTop + MAP - y) / MAP * (t.arena - low());
        // The most recent tensor of several in one pixel; a small one is hit within a pixel.
        const slack = (t.arena - low()) / MAP / 2;
        let hit = null;
        for (const tensor of t.tensors) {
          if (tensor.birth > i || tensor.death < i) continue;
          const inside = address >= tensor.address && address < tensor.address + tensor.bytes;
          const near = address >= tensor.address - slack && address < tensor.address + tensor.bytes + slack;
          if (inside || (near && !hit)) hit = tensor;
          if (inside) break;
        }
        return hit ? { tensor: hit } : { instruction: i };
      }
      return y >= 22 && y < mapTop ? { instruction: i } : null;
    }

    function describe(hit) {
      const rows = [];
      const row = (term, text) => rows.push(element("dt", {}, term), element("dd", {}, text));
      const step = (i) => grouped(i) + ", " + t.instructions[i].label;
      if (hit.tensor) {
        const { tensor } = hit;
        row("size", grouped(tensor.bytes) + " B");
        row("line", tensor.line);
        if (tensor.layer >= 0) row("layer", String(tensor.layer));
        if (tensor.phase) row("phase", tensor.phase);
        row("birth", tensor.whole ? "before the run" : step(tensor.birth));
        row("death", tensor.whole ? "after the run" : step(tensor.death));
        row("address", "0x" + tensor.address.toString(16) + " (" + grouped(tensor.address) + ")");
        return [element("strong", {}, tensor.name), element("dl", {}, ...rows)];
      }
      const i = hit.instruction;
      const instruction = t.instructions[i];
      row("instruction", grouped(i));
      if (instruction.layer >= 0) row("layer", String(instruction.layer));
      row("phase", instruction.phase);
      if (instruction.kernel) row("kernel", instruction.kernel);
      row("expected", (1e6 * instruction.seconds).toFixed(1) + " µs");
      if (t.measured) {
        const { measured, seconds } = instruction;
        const ratio = measured !== null && seconds > 0 ? ", " + (measured / seconds).toFixed(2) + " times expected" : "";
        row("measured", measured === null ? "not run" : (1e6 * measured).toFixed(1) + " µs" + ratio);
      }
      row("in use", grouped(chart.bands.total[i]) + " B");
      const largest = chart.bands.names.map((name, k) => [name, chart.bands.rows[k][i]]).sort((a, b) => b[1] - a[1]).slice(0, 4);
      for (const [name, bytes] of largest) if (bytes > 0) row(name, short(bytes));
      return [element("strong", {}, instruction.label), element("dl", {}, ...rows)];
    }

    function show(hit, x, y) {
      tip.hidden = !hit;
      if (!hit) return;
      tip.replaceChildren(...describe(hit));
      const left = x + 16 + tip.offsetWidth > chart.width ? Math.max(0, Math.min(x - 16 - tip.offsetWidth, chart.width - tip.offsetWidth)) : x + 16;
      tip.style.left = left + "px";
      tip.style.top = y + 16 + "px";
    }

    chart.zoom = (from, to) => {
      const width = Math.min(t.count, Math.max(4, to - from));
      chart.from = Math.max(0, Math.min(t.count - width, from));
      chart.to = chart.from + width;
      chart.draw();
    };
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (chart.drag) {
        chart.drag.to = Math.max(LEFT, Math.min(chart.width - RIGHT, x));
        chart.draw();
      }
      if (!chart.pinned) show(at(x, y), x, y);
    });
    canvas.addEventListener("pointerleave", () => { if (!chart.pinned) show(null); });
    canvas.addEventListener("pointerdown", (event) => {
      const [x] = place(event);
      if (event.pointerType !== "mouse" || x < LEFT) return;
      chart.drag = { from: x, to: x };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y] = place(event);
      const { drag } = chart;
      chart.drag = null;
      if (drag && Math.abs(drag.to - drag.from) > 4) {
        const [a, b] = [drag.from, drag.to].sort((p, q) => p - q);
        chart.zoom(atX(a), atX(b));
        return;
      }
      // A click keeps the text of a tensor until the next click.
      const hit = at(x, y);
      chart.pinned = chart.pinned ? null : hit;
      show(hit, x, y);
      chart.draw();
    });
    canvas.addEventListener("dblclick", () => { chart.pinned = null; chart.zoom(0, t.count); });
    canvas.addEventListener("keydown", (event) => {
      const width = chart.to - chart.from;
      const steps = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.25, -0.25], "-": [-0.5, 0.5], 0: [-Infinity, Infinity] };
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      if (event.key === "0") chart.zoom(0, t.count);
      else chart.zoom(chart.from + step[0] * width, chart.to + step[1] * width);
    });
    return chart;
  }

  // Where most of the arena lasts for the whole run, the tensors of the step would be a thin line above it.
  state.whole = all.every((chart) => chart.t.lasting <= 0.6 * chart.t.arena);
  const redraw = () => all.forEach((chart) => chart.draw());
  const recompute = () => {
    all.forEach((chart) => chart.recompute());
    redraw();
  };
  const stack = element("select", { id: "timeline-stack", oninput: () => {
    state.byLayer = stack.value === "layer";
    recompute();
  } }, element("option", { value: "line" }, "line of the ledger"), element("option", { value: "layer" }, "layer"));
  const addresses = element("select", { id: "timeline-addresses", oninput: () => {
    state.whole = addresses.value === "all";
    redraw();
  } }, element("option", { value: "all" }, "all"), element("option", { value: "step" }, "of the step"));
  addresses.value = state.whole ? "all" : "step";
  const axis = element("select", { id: "timeline-axis", oninput: () => {
    state.axis = axis.value;
    all.forEach((chart) => chart.axis());
    redraw();
  } }, element("option", { value: "instructions" }, "instructions"), element("option", { value: "expected" }, "expected time"),
    ...(all.some((chart) => chart.t.measured) ? [element("option", { value: "measured" }, "measured time")] : []));
  const search = element("input", { id: "timeline-search", type: "search", autocomplete: "off", spellcheck: "false", oninput: () => {
    state.search = search.value;
    redraw();
  } });
  const button = (text, action, change) => element("button", { type: "button", "data-action": action, onclick: () => all.forEach(change) }, text);
  const around = (factor) => (chart) => {
    const middle = (chart.from + chart.to) / 2;
    const half = (chart.to - chart.from) / 2 * factor;
    chart.zoom(middle - half, middle + half);
  };
  const peak = (chart) => {
    const half = Math.max(10, (chart.to - chart.from) / 8);
    chart.zoom(...chart.around(chart.t.peakAt + 0.5, half));
  };
  root.append(
    element("div", {}, element("label", { for: "timeline-stack" }, "Stack by"), stack),
    element("div", {}, element("label", { for: "timeline-addresses" }, "Addresses"), addresses),
    element("div", {}, element("label", { for: "timeline-axis" }, "Axis"), axis),
    element("div", {}, element("label", { for: "timeline-search" }, "Find tensors by name"), search),
    element("div", { class: "buttons" }, button("Zoom in", "zoom-in", around(0.5)), button("Zoom out", "zoom-out", around(2)),
      button("Peak", "zoom-peak", peak), button("Whole step", "zoom-all", (chart) => chart.zoom(0, chart.t.count))),
  );
  const phases = [...new Set(all.flatMap((chart) => chart.t.instructions.map((i) => i.phase)))];
  const key = element("ul", { class: "key" });
  for (const phase of phases) {
    key.append(element("li", {}, swatch("var(--" + phase + ")"), phase));
  }
  root.after(element("p", { class: "note" }, "Drag to zoom, double-click for the whole step; point at a tensor for its name, lifetime and address. " +
    "With the keyboard: + and −, arrows, 0."), key);
  recompute();
  let width = figures[0].clientWidth;
  new ResizeObserver(() => {
    if (figures[0].clientWidth === width) return;
    width = figures[0].clientWidth;
    redraw();
  }).observe(figures[0]);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recompute);
})();
