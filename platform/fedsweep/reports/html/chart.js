"use strict";
// Lines and points on two axes, as SVG. Text is only ever set as text: names come from files of others.

const COLOURS = 8;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const MARKS = [
  (s) => `M${-s} 0a${s} ${s} 0 1 0 ${2 * s} 0a${s} ${s} 0 1 0 ${-2 * s} 0z`,
  (s) => `M${-s} ${-s}h${2 * s}v${2 * s}h${-2 * s}z`,
  (s) => `M0 ${-1.2 * s}L${1.15 * s} ${0.9 * s}H${-1.15 * s}z`,
  (s) => `M0 ${-1.35 * s}L${1.35 * s} 0L0 ${1.35 * s}L${-1.35 * s} 0z`,
  (s) => `M0 ${1.2 * s}L${1.15 * s} ${-0.9 * s}H${-1.15 * s}z`,
];
const colour = (place) => `var(--c${place % COLOURS})`;
const dash = (place) => DASHES[Math.floor(place / 2) % DASHES.length];
const mark = (place, size) => MARKS[place % MARKS.length](size);

function svg(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "fill" || key === "stroke") element.style[key] = value;
    else element.setAttribute(key, value);
  }
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function html(name, properties, parent) {
  const element = Object.assign(document.createElement(name), properties || {});
  if (parent) parent.append(element);
  return element;
}

function bytesText(count) {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let place = 0;
  for (; count >= 999.5 && place < prefixes.length - 1; place += 1) count /= 1000;
  return `${Number(count.toPrecision(3))} ${prefixes[place]}B`;
}

function secondsText(seconds) {
  if (seconds < 99.95) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 5997) return `${Number((seconds / 60).toPrecision(3))} min`;
  if (seconds < 359820) return `${Number((seconds / 3600).toPrecision(3))} h`;
  return `${Number((seconds / 86400).toPrecision(3))} d`;
}

const percentText = (share) => `${Number((100 * share).toFixed(2))} %`;
const plainText = (value) => String(Number(value.toPrecision(4)));

// Round numbers that divide a range into about `count` parts.
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + 1e-9 * step; place += 1) ticks.push(place * step);
  return ticks;
}

function logTicks(low, high, count) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  for (const factors of [[1, 2, 5], [1]]) {
    const ticks = [];
    for (let decade = first; decade <= last; decade += 1) {
      for (const factor of factors) ticks.push(factor * 10 ** decade);
    }
    const within = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    if (within.length <= count || factors.length === 1) {
      const every = Math.ceil(within.length / count);
      return within.filter((_, place) => place % every === 0);
    }
  }
  return [];
}

function makeScale(values, from, to, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low <= high)) [low, high] = log ? [1, 10] : [0, 1];
  const place = log ? Math.log10 : (value) => value;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
  const span = place(high) - place(low);
  const scale = (value) => from + ((place(value) - place(low)) / span) * (to - from);
  return Object.assign(scale, { low, high, ticks: (count) => (log ? logTicks : linearTicks)(low, high, count) });
}

// A chart: { xs, ys } of each series, with `place` (its colour; null: in the background), low and high (a band), and
// `marks`: only points are drawn. Values outside a logarithmic axis are left out.
class Chart {
  constructor(host, tip) {
    this.host = host;
    this.tip = tip;
    this.width = 0;
    new ResizeObserver(() => {
      if (this.settings && Math.abs(host.clientWidth - this.width) > 1) this.draw(this.settings);
    }).observe(host);
    host.addEventListener("pointermove", (event) => this.point(event));
    host.addEventListener("pointerdown", (event) => this.point(event));
    host.addEventListener("pointerleave", () => this.tip.hide());
  }

  draw(settings) {
    this.settings = settings;
    this.width = this.host.clientWidth;
    if (this.width < 100) return; // not laid out yet: drawn when it is
    const narrow = this.width < 520;
    const height = Math.round(Math.max(240, Math.min(430, this.width * 0.5)));
    const box = { left: narrow ? 46 : 58, right: this.width - 14, top: 12, bottom: height - 44 };
    const root = svg("svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": settings.describe });
    const shown = settings.series.map((one) => ({ ...one, points: this.points(one) })).filter((one) => one.points.length);
    if (!shown.length) {
      this.hits = [];
      this.host.replaceChildren(html("p", { className: "empty", textContent: "Nothing was measured yet." }));
      return;
    }
    const x = makeScale(shown.flatMap((one) => one.points.map((p) => p[0])), box.left + (settings.padded ? 14 : 0), box.right - (settings.padded ? 14 : 4), settings.log);
    const bands = shown.flatMap((one) => (one.low ? one.points.flatMap((p) => [p[2], p[3]]) : []));
    const y = makeScale([...shown.flatMap((one) => one.points.map((p) => p[1])), ...bands], box.bottom - 8, box.top + 8, false);
    this.axes(root, box, x, y, narrow);
    this.hits = [];
    const ordered = [...shown.filter((one) => one.place === null), ...shown.filter((one) => one.place !== null)];
    for (const one of ordered) this.series(root, one, x, y);
    if (settings.front) this.front(root, settings.front, x, y, box);
    this.ring = svg("circle", { r: 5, fill: "none", "stroke-width": 2, visibility: "hidden" }, root);
    this.root = root;
    this.host.replaceChildren(root);
  }

  points(one) {
    const found = [];
    one.ys.forEach((value, place) => {
      const at = one.xs[place];
      if (value === null || at === null || (this.settings.log && at <= 0)) return;
      found.push([at, value, one.low ? one.low[place] : value, one.high ? one.high[place] : value]);
    });
    return found;
  }

  axes(root, box, x, y, narrow) {
    const { xText, yText, xName, yName } = this.settings;
    for (const tick of y.ticks(narrow ? 5 : 7)) {
      svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }, root);
      svg("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, root, yText(tick));
    }
    for (const tick of x.ticks(narrow ? 4 : 9)) {
      svg("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: box.top, y2: box.bottom }, root);
      const text = xText(tick);
      const at = Math.min(x(tick), this.width - 3.6 * text.length);
      svg("text", { x: at, y: box.bottom + 16, "text-anchor": "middle" }, root, text);
    }
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, root);
    svg("text", { x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, root, xName);
    svg("text", { x: box.left + 4, y: box.top + 4 }, root, yName);
  }

  series(root, one, x, y) {
    const at = one.points.map((p) => [x(p[0]), y(p[1])]);
    at.forEach((place, index) => this.hits.push([place[0], place[1], one, one.points[index]]));
    const ghost = one.place === null;
    if (one.marks) {
      for (const [px, py] of at) {
        const fill = one.hollow ? "var(--ground)" : ghost ? "var(--other)" : colour(one.place);
        const stroke = ghost ? "var(--other)" : colour(one.place);
        const faint = ghost && !one.strong;
        const shape = mark(ghost ? 0 : one.place, faint ? 3 : 5);
        svg("path", { d: shape, transform: `translate(${px.toFixed(1)} ${py.toFixed(1)})`, fill, stroke, "stroke-width": 1.5, opacity: faint ? 0.6 : 1 }, root);
      }
      return;
    }
    const line = at.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L");
    if (ghost) {
      svg("path", { class: "ghost", d: `M${line}` }, root);
      return;
    }
    if (one.low) {
      const up = one.points.map((p) => `${x(p[0]).toFixed(1)} ${y(p[3]).toFixed(1)}`);
      const down = one.points.map((p) => `${x(p[0]).toFixed(1)} ${y(p[2]).toFixed(1)}`).reverse();
      svg("path", { d: `M${[...up, ...down].join("L")}z`, fill: colour(one.place), opacity: 0.15 }, root);
    }
    const look = { fill: "none", stroke: colour(one.place), "stroke-width": one.thin ? 1.3 : 2, "stroke-linejoin": "round" };
    svg("path", { d: `M${line}`, ...look, "stroke-dasharray": dash(one.place) }, root);
    const [endX, endY] = at[at.length - 1];
    svg("path", { d: mark(one.place, 3.5), transform: `translate(${endX.toFixed(1)} ${endY.toFixed(1)})`, fill: colour(one.place) }, root);
  }

  front(root, front, x, y, box) {
    const steps = front.map(([px, py], place) => (place ? `H${x(px).toFixed(1)}V${y(py).toFixed(1)}` : `M${x(px).toFixed(1)} ${y(py).toFixed(1)}`));
    if (!steps.length) return;
    const path = svg("path", { d: `${steps.join("")}H${box.right}`, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "5 4", opacity: 0.75 });
    root.insertBefore(path, root.querySelector("path"));
  }

  point(event) {
    if (!this.hits || !this.hits.length) return;
    const frame = this.root.getBoundingClientRect();
    const [px, py] = [((event.clientX - frame.left) * this.width) / frame.width, ((event.clientY - frame.top) * this.width) / frame.width];
    let nearest = null;
    let least = 60 ** 2;
    for (const hit of this.hits) {
      // What is in the background gives way to what is highlighted.
      const distance = (hit[0] - px) ** 2 + (hit[1] - py) ** 2 + (hit[2].place === null ? 150 : 0);
      if (distance < least) [nearest, least] = [hit, distance];
    }
    this.ring.setAttribute("visibility", nearest ? "visible" : "hidden");
    if (!nearest) {
      this.tip.hide();
      return;
    }
    const [hx, hy, one, [vx, vy, low, high]] = nearest;
    this.ring.setAttribute("cx", hx);
    this.ring.setAttribute("cy", hy);
    this.ring.style.stroke = one.place === null ? "var(--ink)" : colour(one.place);
    const { xTip, yText, yName } = this.settings;
    const band = one.low ? ` (seeds: ${yText(low)} to ${yText(high)})` : "";
    this.tip.show(event, `${one.name}\n${yName}: ${yText(vy)}${band}\n${xTip(vx)}`);
  }
}

class Tip {
  constructor(element) {
    this.element = element;
  }

  show(event, text) {
    this.element.textContent = text;
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = Math.min(event.pageX + 14, window.scrollX + document.documentElement.clientWidth - width - 6);
    const above = event.pageY - height - 14;
    this.element.style.left = `${Math.max(4, left)}px`;
    this.element.style.top = `${above < window.scrollY ? event.pageY + 18 : above}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}
