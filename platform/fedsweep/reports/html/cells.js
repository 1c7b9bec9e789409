// Maps of cells: clients by class, and clients by round.

// Levels as reports write them: digits, and letters for runs of zeros.
function unpack(text, size) {
  const levels = new Uint8Array(size);
  let place = 0;
  for (const character of text) {
    const code = character.charCodeAt(0);
    if (code < 58) {
      levels[place] = code - 48;
      place += 1;
    } else place += code - 96;
  }
  return levels;
}

const wholeTicks = (axis, cells, count) => linearTicks(axis.first, axis.first + cells * axis.each - 1, count).filter(Number.isInteger);

// Draws layers of levels 0..9 over one another, all cells of a level as one path.
//   layers: [{ levels, fill }], later ones on top; x, y: an axis' name, its first number and how many share a cell; or, for y, bands: [label, middle in rows];
//   tell(row, column): what is said of a cell.
function drawCells(host, tip, { rows, columns, layers, x, y, tell, describe }) {
  const width = host.clientWidth;
  if (width < 100) return; // not laid out yet: drawn when it is
  const cell = Math.min(32, (width - 60) / columns);
  const box = { left: 52, top: 4, right: 52 + cell * columns };
  const tall = Math.max(3, Math.min(16, 340 / rows, Math.max(cell * 1.5, 5)));
  const bottom = box.top + tall * rows;
  const root = svg("svg", { viewBox: `0 0 ${width} ${Math.ceil(bottom + 38)}`, role: "img", "aria-label": describe });
  const gap = cell > 6 && tall > 6 ? 1 : 0;
  for (const { levels, fill } of layers) {
    const paths = {};
    levels.forEach((level, place) => {
      if (!level) return;
      const [row, column] = [Math.floor(place / columns), place % columns];
      const [px, py] = [box.left + column * cell, box.top + row * tall];
      (paths[level] = paths[level] || []).push(`M${px.toFixed(2)} ${py.toFixed(2)}h${(cell - gap).toFixed(2)}v${(tall - gap).toFixed(2)}h${(gap - cell).toFixed(2)}z`);
    });
    for (const [level, parts] of Object.entries(paths)) {
      svg("path", { d: parts.join(""), fill, opacity: (0.12 + (0.88 * level) / 9).toFixed(2) }, root);
    }
  }
  svg("rect", { class: "frame", x: box.left, y: box.top, width: box.right - box.left, height: tall * rows }, root);
  for (const tick of wholeTicks(x, columns, Math.max(1, (box.right - box.left) / 90))) {
    const place = Math.floor((tick - x.first) / x.each);
    svg("text", { x: box.left + (place + 0.5) * cell, y: bottom + 15, "text-anchor": "middle" }, root, tick);
  }
  const spare = y.bands && Math.ceil((18 * y.bands.length) / (tall * rows));
  const ticks = y.bands ? y.bands.filter((_, index) => index % spare === 0) : wholeTicks(y, rows, Math.min(rows, (tall * rows) / 18)).map((tick) => [tick, Math.floor((tick - y.first) / y.each) + 0.5]);
  for (const [tick, place] of ticks) svg("text", { x: box.left - 6, y: box.top + place * tall + 4, "text-anchor": "end" }, root, tick);
  svg("text", { x: (box.left + box.right) / 2, y: bottom + 32, "text-anchor": "middle" }, root, x.each > 1 ? `${x.name} (${x.each} to a column)` : x.name);
  svg("text", { transform: `translate(11 ${(box.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, root, y.name);
  const point = (event) => {
    const frame = root.getBoundingClientRect();
    const factor = width / frame.width;
    const column = Math.floor(((event.clientX - frame.left) * factor - box.left) / cell);
    const row = Math.floor(((event.clientY - frame.top) * factor - box.top) / tall);
    if (column >= 0 && column < columns && row >= 0 && row < rows) tip.show(event, tell(row, column));
    else tip.hide();
  };
  root.addEventListener("pointermove", point);
  root.addEventListener("pointerdown", point);
  root.addEventListener("pointerleave", () => tip.hide());
  host.replaceChildren(root);
}

// "7", or "14 to 15" where several share a cell.
const span = (place, each, most, first) => (each === 1 ? `${place + first}` : `${place * each + first} to ${Math.min(most, (place + 1) * each) - 1 + first}`);

function drawSplit(host, tip, split) {
  const columns = Math.ceil(split.clients / split.per_client);
  const rows = Math.ceil(split.classes / split.per_class);
  const most = Math.max(1, ...split.cells);
  const levels = new Uint8Array(rows * columns);
  split.cells.forEach((count, place) => {
    const [client, kind] = [Math.floor(place / rows), place % rows];
    // The square root: clients with few samples stay visible beside those with many.
    if (count) levels[kind * columns + client] = Math.max(1, Math.round(9 * Math.sqrt(count / most)));
  });
  drawCells(host, tip, {
    rows,
    columns,
    layers: [{ levels, fill: "var(--cohort)" }],
    x: { name: "client", first: 0, each: split.per_client },
    y: { name: "class", first: 0, each: split.per_class },
    tell: (row, column) => `client ${span(column, split.per_client, split.clients, 0)}, class ${span(row, split.per_class, split.classes, 0)}\n${split.cells[column * rows + row]} samples`,
    describe: `How samples of each class fall to clients: ${split.facts}`,
  });
}

function drawParticipation(host, tip, part, layers) {
  const rows = Math.ceil(part.clients / part.per_client);
  const columns = Math.ceil(part.rounds / part.per_round);
  const cells = Object.fromEntries(["present", "cohort", "attended", "high"].filter((name) => part[name] !== undefined).map((name) => [name, unpack(layers[part[name]], rows * columns)]));
  const single = part.per_client === 1 && part.per_round === 1;
  const names = [["present", "there"], ["cohort", "in the cohort"], ["attended", "aggregated"], ...(part.has_high ? [["high", "high-frequency"]] : [])];
  const state = (place) => {
    if (!single) return names.filter(([name]) => cells[name]).map(([name, text]) => `${text}: ${Math.round((100 * cells[name][place]) / 9)} %`).join(", ");
    if (cells.high[place]) return "in the high-frequency group";
    if (!cells.attended) return cells.cohort[place] ? "in the cohort" : cells.present && !cells.present[place] ? "absent" : "not chosen";
    if (cells.cohort[place]) return cells.attended[place] ? "trained and aggregated" : "trained, not aggregated";
    if (cells.attended[place]) return "did not train, earlier work aggregated";
    return cells.present && !cells.present[place] ? "absent" : "not chosen";
  };
  const fills = { present: "var(--there)", cohort: cells.attended ? "var(--trained)" : "var(--cohort)", attended: "var(--cohort)", high: "var(--high)" };
  drawCells(host, tip, {
    rows,
    columns,
    layers: Object.entries(cells).map(([name, levels]) => ({ levels, fill: fills[name] })),
    x: { name: "round", first: part.first, each: part.per_round },
    y: { name: "client", first: 0, each: part.per_client },
    tell: (row, column) => `client ${span(row, part.per_client, part.clients, 0)}, round ${span(column, part.per_round, part.rounds, part.first)}\n${state(row * columns + column)}`,
    describe: "Which clients took part in which rounds",
  });
}

// A band for each client, in it a row for each class.
function drawDrift(host, tip, drift, layers) {
  const each = Math.ceil(drift.classes / drift.per_class) + 1;
  const rows = drift.clients.length * each;
  const columns = Math.ceil(drift.rounds / drift.per_round);
  const levels = unpack(layers[drift.cells], rows * columns);
  drawCells(host, tip, {
    rows,
    columns,
    layers: [{ levels, fill: "var(--cohort)" }],
    x: { name: "round", first: drift.first, each: drift.per_round },
    y: { name: "client", bands: drift.clients.map((client, place) => [client, place * each + (each - 1) / 2]) },
    tell: (row, column) => {
      const [client, place] = [drift.clients[Math.floor(row / each)], row % each];
      if (place === each - 1) return `client ${client}`;
      const share = Math.round((100 * drift.most * levels[row * columns + column]) / 9);
      return `client ${client}, class ${span(place, drift.per_class, drift.classes, 0)}, round ${span(column, drift.per_round, drift.rounds, drift.first)}\n${share ? `about ${share} %` : "none"} of its samples`;
    },
    describe: "Which classes clients have in which rounds",
  });
}
