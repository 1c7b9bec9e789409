"use strict";
// Sorts and filters the tables, and has Plotly draw the charts from the figures in the page.

const byId = (id) => document.getElementById(id);
const every = (selector) => [...document.querySelectorAll(selector)];
const charts = JSON.parse(byId("data").textContent);

function sortTable(table, heading) {
  const before = heading.getAttribute("aria-sort");
  // Of figures the largest come first.
  const down = before === "none" ? heading.classList.contains("number") : before === "ascending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => row.cells[heading.cellIndex].dataset.value ?? row.cells[heading.cellIndex].textContent.trim();
  const order = (a, b) => (down ? -1 : 1) * (a - b || a.localeCompare(b, undefined, { numeric: true }));
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort(([a], [b]) => (a === "") - (b === "") || order(a, b)); // what is unknown stays last
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const button of every("table.sortable thead button")) {
  button.addEventListener("click", () => sortTable(button.closest("table"), button.closest("th")));
}
for (const search of every("input[type=search]")) {
  search.addEventListener("input", () => {
    const text = search.value.trim().toLowerCase();
    for (const row of every(`#${search.dataset.table} tbody tr`)) row.hidden = !row.textContent.toLowerCase().includes(text);
  });
}

function put(tree, path, value) {
  const [last, ...keys] = path.split(".").reverse();
  keys.reverse().reduce((inner, key) => inner[key] ??= {}, tree)[last] = value;
}

const groupOf = (id) => charts[id].group || id;

// The chart as chosen, without the settings that are hidden; in a picture, a logarithmic axis says so in its title.
function figureOf(id, { isPicture }) {
  const { data, layout, choices } = structuredClone(charts[id]);
  let kinds = null;
  for (const select of every(`select[data-chart="${groupOf(id)}"]`)) {
    const option = choices[select.dataset.choice][select.value];
    for (const [key, values] of Object.entries(option.data ?? {})) values.forEach((value, place) => put(data[place], key, value));
    for (const [path, value] of Object.entries(option.layout ?? {})) put(layout, path, value);
    kinds = option.show ?? kinds;
  }
  for (const axis of [layout.xaxis, layout.yaxis]) if (isPicture && axis?.type === "log") axis.title.text += ", log scale";
  const hidden = new Set(every('.legend button[aria-pressed="false"]').map((button) => Number(button.dataset.setting)));
  for (const one of data) if (one.meta.words?.length) one.text = one.z.map((row) => row.map((state) => one.meta.words[state]));
  return { data: data.filter(({ meta }) => (!kinds || kinds.includes(meta.kind)) && !hidden.has(meta.setting)), layout };
}

const config = { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };

function draw(id) {
  const { data, layout } = figureOf(id, { isPicture: true });
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a finger scrolls the page
  return Plotly.react(byId(id), data, layout, config);
}

const drawShown = () => Promise.all(every(".chart").filter((chart) => !chart.closest("[hidden]")).map((chart) => draw(chart.id)));

function csvOf({ data, layout }) {
  const plain = (text) => new DOMParser().parseFromString(text.replaceAll("<br>", " "), "text/html").body.textContent;
  const rows = [["series", layout.xaxis.title.text, layout.yaxis.title?.text ?? "", "value or low", "high", "text"]];
  for (const { meta, x = [], y = [], z, text, customdata, error_y: error } of data) {
    if (z) z.forEach((row, place) => row.forEach((value, column) => rows.push([meta.label, x[column], y[place], value, "", text?.[place][column]])));
    else x.forEach((value, place) => {
      const [low, high] = customdata?.[place] ?? (error ? [y[place] - error.arrayminus[place], y[place] + error.array[place]] : []);
      rows.push([meta.label, value, y[place], low, high, plain((Array.isArray(text) ? text[place] : text) ?? "")]);
    });
  }
  // A spreadsheet must not take a name for a formula.
  const cell = (value) => typeof value === "string" ? `"${value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"` : value ?? "";
  return rows.map((row) => row.map(cell).join(",")).join("\r\n");
}

function save(id, kind) {
  const figure = figureOf(id, { isPicture: kind === "svg" });
  const layout = { ...figure.layout, showlegend: figure.data.length > 1 };
  if (kind === "svg") return Plotly.downloadImage({ data: figure.data, layout }, { format: "svg", width: 900, height: layout.height, filename: id });
  const href = URL.createObjectURL(new Blob([csvOf(figure)], { type: "text/csv" }));
  return Object.assign(document.createElement("a"), { download: `${id}.csv`, href }).click();
}

const chips = every(".legend button");
const press = (chosen) => { chips.forEach((chip) => chip.setAttribute("aria-pressed", String(chosen(chip)))); drawShown(); };
const isOn = (chip) => chip.getAttribute("aria-pressed") === "true";
for (const chip of chips) {
  chip.addEventListener("click", () => press((other) => isOn(other) !== (other === chip)));
  chip.addEventListener("dblclick", () => press((other) => other === chip));
}
for (const button of every("button[data-show]")) button.addEventListener("click", () => press(() => button.dataset.show === "all"));
for (const button of every("button[data-save]")) button.addEventListener("click", () => save(button.dataset.chart, button.dataset.save));
for (const select of every("select[data-chart]")) select.addEventListener("change", () => Object.keys(charts).filter((id) => groupOf(id) === select.dataset.chart).forEach(draw));
byId("client-run")?.addEventListener("change", ({ target }) => {
  const shown = target.selectedOptions[0].dataset.charts.split(" ");
  for (const figure of every("#clients figure")) figure.hidden = !shown.includes(figure.dataset.chart);
  drawShown();
});
drawShown().then(() => { document.documentElement.dataset.readyMs = String(Math.round(performance.now())); });
