// Class shares of the two groups of a cohort over the rounds, against the population's.

//   labels: { population, low, high }: a group has { rounds, mean, spread: the 10th, 25th, 75th, 90th percentile }.
function drawLabels(host, tip, labels) {
  const width = host.clientWidth;
  if (width < 100) return; // not laid out yet: drawn when it is
  const count = labels.population.length;
  const groups = [["low", "var(--cohort)", -0.2], ["high", "var(--high)", 0.2]].filter(([name]) => labels[name]);
  const cell = Math.min(60, (width - 70) / count);
  const box = { left: 58, top: 8, right: 58 + cell * count, bottom: 188 };
  const most = Math.max(...labels.population, ...groups.flatMap(([name]) => labels[name].spread[3]), 1e-6);
  const root = svg("svg", { viewBox: `0 0 ${width} ${box.bottom + 38}`, role: "img", "aria-label": "Class shares of the high-frequency and the low-frequency group over the rounds, against the population's" });
  const across = (place) => box.left + (place + 0.5) * cell;
  const up = (share) => box.bottom - (share / most) * (box.bottom - box.top);
  for (const tick of linearTicks(0, most, 4)) {
    svg("path", { class: "gridline", d: `M${box.left} ${up(tick).toFixed(1)}H${box.right.toFixed(1)}` }, root);
    svg("text", { x: box.left - 6, y: up(tick) + 4, "text-anchor": "end" }, root, percentText(tick));
  }
  const bars = (name, low, high, shift) => labels[name].spread[low].map((share, place) => `M${(across(place) + shift * cell).toFixed(1)} ${up(share).toFixed(1)}V${up(labels[name].spread[high][place]).toFixed(1)}`).join("");
  for (const [name, stroke, shift] of groups) {
    svg("path", { d: bars(name, 0, 3, shift), stroke, "stroke-width": 1.5 }, root);
    svg("path", { d: bars(name, 1, 2, shift), stroke, "stroke-width": Math.max(2, Math.min(6, cell / 5)) }, root);
    labels[name].mean.forEach((share, place) => svg("circle", { cx: across(place) + shift * cell, cy: up(share), r: Math.max(1.5, Math.min(4, cell / 6)), fill: stroke, stroke: "white", "stroke-width": 0.8 }, root));
  }
  const level = (share, place) => `M${(across(place) - 0.45 * cell).toFixed(1)} ${up(share).toFixed(1)}h${(0.9 * cell).toFixed(1)}`;
  svg("path", { d: labels.population.map(level).join(""), stroke: "currentColor", "stroke-width": 1.5 }, root);
  for (const tick of linearTicks(0, count - 1, Math.max(1, (box.right - box.left) / 40)).filter(Number.isInteger)) {
    svg("text", { x: across(tick), y: box.bottom + 15, "text-anchor": "middle" }, root, tick);
  }
  svg("text", { x: (box.left + box.right) / 2, y: box.bottom + 32, "text-anchor": "middle" }, root, "class");
  svg("text", { transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, root, "share of the group");
  const point = (event) => {
    const frame = root.getBoundingClientRect();
    const place = Math.floor((((event.clientX - frame.left) * width) / frame.width - box.left) / cell);
    if (place < 0 || place >= count) return tip.hide();
    const lines = groups.map(([name]) => `${name}-frequency group ${percentText(labels[name].mean[place])}`);
    return tip.show(event, [`class ${place}: population ${percentText(labels.population[place])}`, ...lines].join("\n"));
  };
  root.addEventListener("pointermove", point);
  root.addEventListener("pointerdown", point);
  root.addEventListener("pointerleave", () => tip.hide());
  host.replaceChildren(root);
}
