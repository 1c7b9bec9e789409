// The page: sortable tables, and the controls of charts and maps.

const data = JSON.parse(document.getElementById("data").textContent);
const tip = new Tip(document.getElementById("tip"));
const byId = (id) => document.getElementById(id);
const pressed = (button, on) => button.setAttribute("aria-pressed", on ? "true" : "false");

// ---- tables ----

function cellKey(row, column) {
  const cell = row.cells[column];
  if (!cell) return null;
  if (cell.dataset.value === undefined) return cell.textContent.trim();
  return cell.dataset.value === "" ? null : Number(cell.dataset.value);
}

function compareKeys(a, b) {
  const numbers = [Number(a), Number(b)];
  if (a !== "" && b !== "" && !numbers.some(Number.isNaN)) return numbers[0] - numbers[1];
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}

function sortTable(table, heading) {
  const column = heading.cellIndex;
  const before = heading.getAttribute("aria-sort");
  const numeric = heading.classList.contains("number");
  // Of figures the largest come first.
  const down = before === "none" ? numeric : before === "ascending";
  for (const other of table.tHead.rows[0].cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => [cellKey(row, column), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null); // what is unknown stays last
    return down ? compareKeys(b, a) : compareKeys(a, b);
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

function prepareTable(table) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = html("button", { type: "button", textContent: heading.textContent, title: heading.title });
    heading.replaceChildren(button);
    button.addEventListener("click", () => sortTable(table, heading));
  }
  if (!table.classList.contains("foldable")) return;
  const rows = [...table.tBodies[0].rows];
  const holder = table.parentElement;
  const controls = html("div", { className: "controls" });
  const search = html("input", { type: "search", placeholder: "filter", ariaLabel: "Show only rows with this text" }, controls);
  const count = html("span", { className: "lead", role: "status" }, controls);
  const more = html("button", { type: "button", className: "plain" });
  let open = false;
  const update = () => {
    const text = search.value.trim().toLowerCase();
    let matching = 0;
    for (const row of rows) {
      row.hidden = text !== "" && !row.textContent.toLowerCase().includes(text);
      matching += !row.hidden;
    }
    count.textContent = text ? `${matching} of ${rows.length}` : "";
    table.classList.toggle("folded", !open && !text);
    more.hidden = text !== "";
    more.textContent = open ? "Show fewer" : `Show all ${rows.length}`;
    more.ariaExpanded = String(open);
  };
  search.addEventListener("input", update);
  more.addEventListener("click", () => {
    open = !open;
    update();
  });
  holder.before(controls);
  holder.after(more);
  update();
}

// ---- what is highlighted ----

const highlighted = []; // settings by colour; null where a colour is free
const placeOf = (setting) => {
  const place = highlighted.indexOf(setting);
  return place < 0 ? null : place;
};

function toggle(setting) {
  const place = highlighted.indexOf(setting);
  if (place >= 0) highlighted[place] = null;
  else if (highlighted.includes(null)) highlighted[highlighted.indexOf(null)] = setting;
  else highlighted.push(setting);
}

function paintSwatches() {
  for (const swatch of document.querySelectorAll(".swatch")) {
    const place = placeOf(Number(swatch.dataset.setting));
    swatch.style.background = place === null ? "" : colour(place);
    swatch.style.borderColor = place === null ? "" : colour(place);
  }
}

function drawLegend() {
  const host = byId("legend");
  host.replaceChildren();
  if (data.settings.length < 2) return;
  data.settings.forEach((setting, index) => {
    const place = placeOf(index);
    const button = html("button", { type: "button", title: setting.label });
    pressed(button, place !== null);
    const sample = svg("svg", { width: 26, height: 12, "aria-hidden": "true" }, button);
    const stroke = place === null ? "var(--other)" : colour(place);
    svg("path", { d: "M1 6H25", stroke, "stroke-width": 2, "stroke-dasharray": place === null ? "" : dash(place) }, sample);
    if (place !== null) svg("path", { d: mark(place, 3.5), transform: "translate(13 6)", fill: stroke }, sample);
    html("span", { textContent: setting.label }, button);
    button.addEventListener("click", () => {
      toggle(index);
      drawAll();
      byId("legend").children[index].focus();
    });
    host.append(button);
  });
}

// ---- curves and the front ----

const AXES = {
  round: { name: "round", text: (v) => String(Math.round(v * 100) / 100), tip: (v) => `round ${v}` },
  bytes: { name: "bytes sent, both ways", text: bytesText, tip: (v) => `${bytesText(v)} sent` },
  time: { name: "simulated time", text: secondsText, tip: (v) => `${secondsText(v)} simulated` },
};
const SHARES = ["test_accuracy", "validation_accuracy"];
const hasSeeds = data.settings.some((setting) => setting.counted.length > 1);
const hasTime = data.runs.some((run) => run.curve.time);
const choice = { axis: "round", figure: Object.keys(data.figures)[0], means: hasSeeds, log: false };

const runName = (run) => (data.settings[run.setting].runs.length > 1 ? `${run.label}, seed ${run.seed}` : run.label) + (run.status === "finished" ? "" : ` (${run.status})`);

function seriesOf(curve, name, place) {
  if (!curve || !curve.figures[choice.figure] || !curve[choice.axis]) return [];
  const band = curve.low && place !== null ? { low: curve.low[choice.figure], high: curve.high[choice.figure] } : {};
  return [{ name, place, xs: curve[choice.axis], ys: curve.figures[choice.figure], ...band }];
}

function curveSeries() {
  if (!choice.means) return data.runs.flatMap((run) => seriesOf(run.curve, runName(run), placeOf(run.setting)).map((one) => ({ ...one, thin: hasSeeds })));
  return data.settings.flatMap((setting, index) => {
    const counted = setting.counted.length;
    const curve = setting.curve || (counted ? data.runs[setting.counted[0]].curve : null);
    return seriesOf(curve, setting.label + (counted > 1 ? `, mean of ${counted} seeds` : ""), placeOf(index));
  });
}

function drawCurves(chart) {
  if (!choice.figure) return;
  const axis = AXES[choice.axis];
  const share = SHARES.includes(choice.figure);
  chart.draw({
    series: curveSeries(),
    log: choice.log,
    xName: axis.name,
    xText: axis.text,
    xTip: axis.tip,
    yName: data.figures[choice.figure],
    yText: share ? percentText : plainText,
    describe: `${data.figures[choice.figure]} against ${axis.name}; the figures stand in the tables`,
  });
  const faint = data.settings.length > highlighted.filter((setting) => setting !== null).length;
  byId("curve-hint").textContent = [
    choice.means ? "Lines are means over seeds, as far as all of them went; bands reach from the lowest to the highest seed." : "",
    faint ? "What is not highlighted is drawn in grey: choose above." : "",
    data.settings.length > 1 ? "Point at a line to see whose it is." : "",
  ].join(" ").trim();
}

function drawFront(chart) {
  const pick = choice.means
    ? data.settings.map((setting, index) => ({ name: setting.label, place: placeOf(index), hollow: setting.counted.every((run) => data.runs[run].status !== "finished"), ...setting }))
    : data.runs.map((run) => ({ ...run, name: runName(run), place: placeOf(run.setting), hollow: run.status !== "finished", skip: run.status === "failed" }));
  const able = pick.filter((one) => one.bytes > 0 && one.accuracy !== null && !one.skip);
  const front = data.front[choice.means ? "settings" : "runs"].map((index) => pick[index]).filter((one) => one.bytes > 0);
  const sent = able.map((one) => one.bytes);
  chart.draw({
    series: able.map((one) => ({ name: one.name, strong: front.includes(one), place: one.place, hollow: one.hollow, marks: true, xs: [one.bytes], ys: [one.accuracy] })),
    front: front.map((one) => [one.bytes, one.accuracy]),
    padded: true,
    log: Math.max(...sent) > 4 * Math.min(...sent),
    xName: AXES.bytes.name,
    xText: bytesText,
    xTip: AXES.bytes.tip,
    yName: "test accuracy",
    yText: percentText,
    describe: "Test accuracy against bytes sent, with the Pareto front; the front stands in the table below",
  });
}

function buttonGroup(host, label, entries, current, chosen) {
  const group = html("div", { className: "group", role: "group", ariaLabel: label }, host);
  const buttons = entries.map(([key, text, able]) => {
    const button = html("button", { type: "button", textContent: text, disabled: !able, title: able ? "" : "not measured in these runs" }, group);
    pressed(button, key === current);
    button.addEventListener("click", () => {
      buttons.forEach((other) => pressed(other, other === button));
      chosen(key);
    });
    return button;
  });
}

function checkbox(host, text, on, changed) {
  const label = html("label", {}, host);
  const box = html("input", { type: "checkbox", checked: on }, label);
  label.append(text);
  box.addEventListener("change", () => changed(box.checked));
}

function curveControls(host) {
  const figures = Object.entries(data.figures);
  if (!figures.length) return;
  const select = html("select", { ariaLabel: "What is drawn" }, host);
  for (const [key, text] of figures) html("option", { value: key, textContent: text }, select);
  select.addEventListener("change", () => {
    choice.figure = select.value;
    drawCurves(curves);
  });
  const axes = [["round", "rounds", true], ["bytes", "bytes", true], ["time", "simulated time", hasTime]];
  buttonGroup(host, "Drawn against", axes, choice.axis, (key) => {
    choice.axis = key;
    drawCurves(curves);
  });
  checkbox(host, "logarithmic", false, (on) => {
    choice.log = on;
    drawCurves(curves);
  });
  if (hasSeeds) {
    checkbox(host, "means over seeds", true, (on) => {
      choice.means = on;
      drawAll();
    });
  }
}

// ---- clients ----

function legendOf(host, entries) {
  const line = html("p", { className: "hint" }, host);
  for (const [fill, text] of entries) {
    const swatch = html("span", { className: "swatch" }, line);
    swatch.style.background = fill;
    swatch.style.borderColor = fill;
    line.append(`${text}   `);
  }
}

function drawClients(index) {
  const host = byId("client-maps");
  const { splits, layers, views } = data.clients;
  const view = views[index];
  host.replaceChildren();
  if (view.split !== undefined) {
    const split = splits[view.split];
    html("h3", { textContent: "What clients hold" }, host);
    drawSplit(html("div", { className: "chart" }, host), tip, split);
    html("p", { className: "hint", textContent: `${split.facts}. The stronger the colour, the more samples.` }, host);
  }
  if (view.part) {
    html("h3", { textContent: "Who took part" }, host);
    drawParticipation(html("div", { className: "chart" }, host), tip, view.part, layers);
    const groups = view.part.attended === undefined ? [["var(--cohort)", "in the cohort"]] : [["var(--trained)", "trained, not aggregated"], ["var(--cohort)", "aggregated"]];
    if (view.part.present !== undefined) groups.unshift(["var(--there)", "there"]);
    if (view.part.has_high) groups.push(["var(--high)", "in the high-frequency group"]);
    legendOf(host, groups);
    if (view.part.aggregated !== undefined) html("p", { className: "hint", textContent: `${view.part.aggregated} of ${view.part.rounds} rounds aggregated.` }, host);
  }
  if (view.labels) {
    html("h3", { textContent: "What labels the high-frequency group holds" }, host);
    drawLabels(html("div", { className: "chart" }, host), tip, view.labels);
    const groups = [["currentColor", "population"]];
    if (view.labels.low) groups.push(["var(--cohort)", "low-frequency group"]);
    legendOf(host, [...groups, ["var(--high)", "high-frequency group"]]);
    html("p", { className: "hint", textContent: `Over ${view.labels.high.rounds} rounds: the dot is the mean, the thick line holds half of the rounds, the thin one eight in ten.` }, host);
  }
  if (view.drift) {
    const { clients, of, most } = view.drift;
    html("h3", { textContent: "Which classes clients had" }, host);
    drawDrift(html("div", { className: "chart" }, host), tip, view.drift, layers);
    const some = clients.length < of ? `${clients.length} of ${of} clients. ` : "";
    html("p", { className: "hint", textContent: `${some}A band is a client, a row in it a class, class 0 on top. The stronger the colour, the larger the class's share of the client's samples in the round, up to ${Math.round(100 * most)} %.` }, host);
  }
}

function clientControls(host) {
  const known = Object.keys(data.clients.views).map(Number);
  if (!known.length) return;
  // Settings stand in the order of the tables, the best first.
  const ordered = data.settings.flatMap((setting) => setting.runs).filter((run) => known.includes(run));
  const label = html("label", { textContent: "Run " }, host);
  const select = html("select", {}, label);
  for (const run of ordered) html("option", { value: run, textContent: runName(data.runs[run]) }, select);
  select.addEventListener("change", () => drawClients(select.value));
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(byId("client-maps").clientWidth - width) <= 1) return;
    width = byId("client-maps").clientWidth;
    drawClients(select.value);
  }).observe(byId("client-maps"));
}

// ---- start ----

const curves = new Chart(byId("curve-chart"), tip);
const front = new Chart(byId("front-chart"), tip);

function drawAll() {
  drawLegend();
  paintSwatches();
  drawCurves(curves);
  drawFront(front);
}

data.settings.slice(0, COLOURS).forEach((_, index) => toggle(index));
document.querySelectorAll("table.sortable").forEach(prepareTable);
curveControls(byId("curve-controls"));
clientControls(byId("client-controls"));
drawAll();
document.documentElement.dataset.readyMs = String(Math.round(performance.now()));
