// The tables of a page: sorting, search, filters, columns and pages. Every element with `data-table="ID"` is filled from
// the JSON in the element ID. Texts of the data enter the page as text nodes and attributes only, never as markup.
"use strict";
const SVG = "http" + "://www.w3.org/2000/svg";

// Creates an element. Properties that begin with `on` are listeners, all others attributes.
function element(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function grouped(number) {
  const digits = String(number);
  return digits.length <= 4 ? digits : digits.replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

(() => {
  const PAGE_SIZES = [25, 50, 100, 250];
  const collator = new Intl.Collator("en", { numeric: true });

  function dot(word) {
    const series = { virus: "s-virus", other: "s-other" }[word] || "s-none";
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "dot");
    svg.setAttribute("aria-hidden", "true");
    const mark = document.createElementNS(SVG, "rect");
    for (const [name, value] of Object.entries({ class: series, width: "100%", height: "100%" })) mark.setAttribute(name, value);
    svg.append(mark);
    return svg;
  }

  // A column with the value of a row as a number or a text, and its text on the page.
  function prepare(column) {
    const scale = 10 ** (column.stored || 0);
    if (column.kind === "number") column.values = column.values.map((value) => (value === null ? null : value / scale));
    column.numeric = column.kind === "number" || column.kind === "count";
    column.text = (row) => {
      const value = column.values[row];
      if (value === null) return null;
      if (column.kind === "number") return value.toFixed(4);
      if (column.kind === "count") return grouped(value);
      return column.kind === "word" ? column.words[value] : value;
    };
    // Place of every row in ascending order of a text or word, computed once: comparing texts is slow.
    column.rank = () => {
      if (column.numeric) return column.values;
      if (!column.ranks) {
        const texts = column.values.map((_, row) => column.text(row));
        const order = [...new Set(texts.filter((text) => text !== null))].sort(collator.compare);
        const place = new Map(order.map((text, at) => [text, at]));
        column.ranks = texts.map((text) => (text === null ? null : place.get(text)));
      }
      return column.ranks;
    };
    return column;
  }

  function build(root, data) {
    const columns = data.columns.map(prepare);
    const total = columns[0].values.length;
    const filters = [];
    let { key: sortKey, descending } = data.sort;
    let rows = [];
    let page = 0;
    let size = PAGE_SIZES[0];

    const head = element("tr", { role: "row" });
    const body = element("tbody", { role: "rowgroup" });
    const status = element("p", { class: "status", role: "status" });
    const place = element("span");
    const controls = element("div", { class: "controls" });

    // A filter is a function from a row to whether it is kept, or null while nothing is chosen.
    function addFilter(label, control, make) {
      const filter = { test: null };
      filters.push(filter);
      control.forEach((input) => input.addEventListener("input", () => {
        filter.test = make();
        select();
      }));
      const id = root.id + "-filter-" + filters.length;
      if (control.length === 1) {
        control[0].id = id;
        controls.append(element("div", {}, element("label", { for: id }, label), control[0]));
      } else {
        controls.append(element("fieldset", {}, element("legend", {}, label), element("div", {}, control[0], "to", control[1])));
      }
    }

    for (const column of columns.filter((column) => column.filter)) {
      if (column.kind === "text") {
        const input = element("input", { type: "search", autocomplete: "off", spellcheck: "false", "data-filter": column.key });
        addFilter("Search in " + column.label.toLowerCase(), [input], () => {
          const wanted = input.value.trim().toLowerCase();
          return wanted && ((row) => column.values[row].toLowerCase().includes(wanted));
        });
      } else if (column.kind === "word") {
        const counts = new Map();
        column.values.forEach((value) => counts.set(value, (counts.get(value) || 0) + 1));
        if (counts.size < 2) continue;
        const input = element("select", { "data-filter": column.key }, element("option", { value: "" }, "all"));
        for (const [value, count] of [...counts].sort((a, b) => b[1] - a[1])) {
          const text = (value === null ? "none" : column.words[value]) + " (" + grouped(count) + ")";
          input.append(element("option", { value: value === null ? "null" : String(value) }, text));
        }
        addFilter(column.label, [input], () => {
          const wanted = input.value === "null" ? null : Number(input.value);
          return input.value !== "" && ((row) => column.values[row] === wanted);
        });
      } else {
        const range = ["least", "most"].map((end) => element("input", {
          inputmode: "decimal", placeholder: end, "aria-label": column.label + ", " + end, "data-filter": column.key + "-" + end,
        }));
        addFilter(column.label, range, () => {
          // What is not a number is marked and does not filter.
          const limits = range.map((input) => {
            const text = input.value.trim().replace(",", ".");
            const number = text === "" ? NaN : Number(text);
            if (text !== "" && Number.isNaN(number)) input.setAttribute("aria-invalid", "true");
            else input.removeAttribute("aria-invalid");
            return number;
          });
          if (limits.every(Number.isNaN)) return null;
          const [least, most] = [Number.isNaN(limits[0]) ? -Infinity : limits[0], Number.isNaN(limits[1]) ? Infinity : limits[1]];
          return (row) => column.values[row] !== null && column.values[row] >= least && column.values[row] <= most;
        });
      }
    }

    const phone = element("select", { id: root.id + "-order", oninput: () => {
      const [key, direction] = phone.value.split(" ");
      order(key, direction === "down");
    } });
    controls.append(element("div", { class: "phone" }, element("label", { for: root.id + "-order" }, "Order"), phone));

    controls.append(element("button", { type: "button", "data-action": "reset", onclick: () => {
      controls.querySelectorAll("[data-filter]").forEach((input) => {
        input.value = "";
        input.removeAttribute("aria-invalid");
      });
      filters.forEach((filter) => { filter.test = null; });
      select();
    } }, "Clear filters"));

    const choices = element("div");
    for (const column of columns) {
      const box = element("input", { type: "checkbox", checked: column.shown, "data-column": column.key, onchange: () => {
        column.shown = box.checked;
        header();
        show();
      } });
      if (column.kind !== "text") choices.append(element("label", {}, box, column.label));
      for (const [mark, direction] of [["\u2191", "up"], ["\u2193", "down"]]) {
        phone.append(element("option", { value: column.key + " " + direction }, column.label + " " + mark));
      }
    }
    controls.append(element("details", { class: "columns" }, element("summary", {}, "Columns"), choices));

    function header() {
      head.replaceChildren(...columns.filter((column) => column.shown).map((column) => element("th", {
        scope: "col", role: "columnheader", class: column.numeric ? "n" : null, "data-key": column.key,
        "aria-sort": column.key === sortKey ? (descending ? "descending" : "ascending") : "none",
      }, element("button", { type: "button", title: column.help, onclick: () => {
        // Numbers begin with the largest, texts with the first.
        order(column.key, column.key === sortKey ? !descending : column.numeric);
      } }, column.label))));
    }

    function order(key, down) {
      sortKey = key;
      descending = down;
      for (const cell of head.children) {
        cell.setAttribute("aria-sort", cell.dataset.key === key ? (down ? "descending" : "ascending") : "none");
      }
      select();
    }

    // Chooses and orders the rows. Missing values come last in either direction; equal values keep the order of the input.
    function select() {
      const tests = filters.map((filter) => filter.test).filter(Boolean);
      rows = [];
      for (let row = 0; row < total; row += 1) if (tests.every((test) => test(row))) rows.push(row);
      const column = columns.find((column) => column.key === sortKey);
      if (column) {
        const rank = column.rank();
        const sign = descending ? -1 : 1;
        rows.sort((a, b) => {
          const [x, y] = [rank[a], rank[b]];
          if (x === null || y === null) return (x === null) - (y === null) || a - b;
          return sign * (x - y) || a - b;
        });
      }
      phone.value = sortKey + (descending ? " down" : " up");
      page = 0;
      show();
    }

    function cell(column, row) {
      const text = column.text(row);
      const isName = column.kind === "text";
      const node = element(isName ? "th" : "td", {
        class: isName ? null : column.numeric ? "n" : "w", role: isName ? "rowheader" : "cell", scope: isName ? "row" : null, "data-label": column.label,
      });
      const content = element("span", text === null ? { class: "na" } : {}, text === null ? "NA" : text);
      if (column.key === "prediction" && text !== null) content.prepend(dot(text));
      node.append(content);
      return node;
    }

    function show() {
      const shown = columns.filter((column) => column.shown);
      const first = page * size;
      const last = Math.min(first + size, rows.length);
      body.replaceChildren(...rows.slice(first, last).map((row) => element("tr", { role: "row" }, ...shown.map((column) => cell(column, row)))));
      const pages = Math.max(1, Math.ceil(rows.length / size));
      const match = rows.length === total ? "" : " that match, of " + grouped(total);
      status.textContent = rows.length === 0
        ? "No row matches; the table has " + grouped(total) + "."
        : "Rows " + grouped(first + 1) + " to " + grouped(last) + " of " + grouped(rows.length) + match;
      place.textContent = "Page " + grouped(page + 1) + " of " + grouped(pages);
      for (const [button, step] of steps) button.disabled = page + step < 0 || page + step >= pages;
    }

    const steps = [["Previous", -1], ["Next", 1]].map(([text, step]) => [element("button", {
      type: "button", "data-action": text.toLowerCase(), onclick: () => {
        page += step;
        show();
      },
    }, text), step]);
    const sizes = element("select", { id: root.id + "-size", oninput: () => {
      size = Number(sizes.value);
      page = 0;
      show();
    } }, ...PAGE_SIZES.map((size) => element("option", { value: size }, String(size))));
    const table = element("table", { class: "data", role: "table" }, element("caption", {}, root.dataset.caption),
      element("thead", { role: "rowgroup" }, head), body);
    root.append(controls, status, element("div", { class: "scroll" }, table), element("div", { class: "pager" }, steps[0][0],
      place, steps[1][0], element("label", { for: root.id + "-size" }, "Rows on a page"), sizes));
    header();
    select();
  }

  for (const root of document.querySelectorAll("[data-table]")) {
    build(root, JSON.parse(document.getElementById(root.dataset.table).textContent));
  }
})();
