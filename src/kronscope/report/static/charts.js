// Charts as SVG. Colours are variables of the page, so the scheme can change without drawing again.
const INK = "var(--ink)", SOFT = "var(--soft)", GRID = "var(--grid)", LINE = "var(--line)";

function polygon(x, y, radius, corners, turn, inner = 1) {
  const many = inner === 1 ? corners : 2 * corners;
  const points = Array.from({ length: many }, (_, i) => {
    const angle = (turn + (360 * i) / many) * (Math.PI / 180);
    const size = i % 2 && inner !== 1 ? radius * inner : radius;
    return `${(x + size * Math.sin(angle)).toFixed(2)},${(y - size * Math.cos(angle)).toFixed(2)}`;
  });
  return `M${points.join("L")}Z`;
}

const MARKERS = {
  o: (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  s: (x, y, r) => polygon(x, y, 1.25 * r, 4, 45),
  "^": (x, y, r) => polygon(x, y, 1.3 * r, 3, 0),
  v: (x, y, r) => polygon(x, y, 1.3 * r, 3, 180),
  "<": (x, y, r) => polygon(x, y, 1.3 * r, 3, 270),
  ">": (x, y, r) => polygon(x, y, 1.3 * r, 3, 90),
  D: (x, y, r) => polygon(x, y, 1.3 * r, 4, 0),
  d: (x, y, r) => `M${x},${y - 1.4 * r}L${x + 0.8 * r},${y}L${x},${y + 1.4 * r}L${x - 0.8 * r},${y}Z`,
  P: (x, y, r) => polygon(x, y, 1.4 * r, 4, 0, 0.5),
  X: (x, y, r) => polygon(x, y, 1.4 * r, 4, 45, 0.5),
  h: (x, y, r) => polygon(x, y, 1.15 * r, 6, 0),
  p: (x, y, r) => polygon(x, y, 1.15 * r, 5, 0),
  "*": (x, y, r) => polygon(x, y, 1.4 * r, 5, 0, 0.45),
};

function marker(look, x, y, radius) {
  const draw = MARKERS[look.marker] || MARKERS.o;
  const hollow = look.width > 2;
  return shape("path", {
    d: draw(x, y, radius), fill: hollow ? "var(--card)" : look.color, stroke: look.color, "stroke-width": hollow ? 1.6 : 0.6,
  });
}

function swatch(look) {
  const picture = shape("svg", { width: 26, height: 14, viewBox: "0 0 26 14", "aria-hidden": "true" });
  if (look.line !== false) {
    picture.append(shape("path", { d: "M1,7H25", stroke: look.color, "stroke-width": look.width, "stroke-dasharray": (look.dashes || []).join(" ") }));
  }
  if (look.marker) picture.append(marker(look, 13, 7, 4));
  else if (look.line === false) picture.append(shape("rect", { x: 8, y: 2, width: 10, height: 10, fill: look.color }));
  return picture;
}

function niceTicks(low, high, many) {
  const span = high - low || 1;
  const raw = span / Math.max(many, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + 1e-9 * span; i += 1) ticks.push(+(i * size).toPrecision(12));
  return { ticks, digits: Math.max(0, Math.min(8, Math.ceil(-Math.log10(size) - 1e-9) + (/25/.test(String(size)) ? 1 : 0))) };
}

function linearScale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

// From 0 to 1, or closer when all values are near 1; with `fit`, as close as the values allow.
function cosineLimits(values, fit) {
  const finite = values.filter(isNumber);
  if (!finite.length) return [0, 1.03];
  const low = Math.min(...finite), high = Math.max(...finite);
  if (fit) {
    const pad = Math.max(0.06 * (high - low), 0.0005);
    return [low - pad, high + pad];
  }
  if (low >= 0.8) {
    const gap = Math.max(1 - low, 0.001);
    return [1 - 1.25 * gap, Math.max(1 + 0.1 * gap, high + 0.05 * gap)];
  }
  return [Math.min(0, low - 0.03), Math.max(1.03, high + 0.03)];
}

function tipFor(holder) {
  const tip = element("div", { class: "tip", hidden: true });
  holder.append(tip);
  return {
    hide() { tip.hidden = true; },
    // Beside the place x, at the height y; or, so as not to cover the line from y to `bottom`, below or above it.
    show(title, lines, x, y, bottom) {
      fill(tip, element("b", {}, title), lines.map((line) => element("div", {}, swatchDot(line.look), line.name, element("span", {}, line.value),
        line.note ? element("em", {}, line.note) : null)));
      tip.hidden = false;
      const left = x + 14 + tip.offsetWidth > holder.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
      tip.style.left = `${Math.max(0, Math.min(left, holder.clientWidth - tip.offsetWidth))}px`;
      const box = holder.getBoundingClientRect();
      const above = y - tip.offsetHeight - 6;
      const below = box.top + bottom + tip.offsetHeight + 12 > window.innerHeight && box.top + above > 0 ? above : bottom + 6;
      tip.style.top = `${bottom === undefined ? Math.max(0, y - tip.offsetHeight / 2) : below}px`;
    },
  };
}

function swatchDot(look) {
  const picture = shape("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" });
  picture.append(look.marker ? marker(look, 7, 7, 4) : shape("rect", { x: 2, y: 2, width: 10, height: 10, fill: look.color }));
  return picture;
}

function speak(text) {
  byId("live").textContent = text;
}

// Hovering, touching, and arrow keys all choose one of the places along an axis.
function choosing(holder, many, nearest, choose, hide) {
  let current = -1, pointer = null;
  const go = (place, aloud) => {
    if (place < 0 || place >= many) return;
    current = place;
    choose(place, aloud, aloud ? null : pointer);
  };
  const leave = () => { current = -1; hide(); };
  const point = (event) => {
    const box = holder.getBoundingClientRect();
    pointer = event.clientX - box.left;
    go(nearest(pointer, event.clientY - box.top), false);
  };
  holder.addEventListener("pointermove", point);
  holder.addEventListener("pointerdown", point);
  holder.addEventListener("pointerleave", leave);
  holder.addEventListener("blur", leave);
  holder.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key in moves) go(Math.max(0, Math.min(many - 1, current < 0 ? (moves[event.key] > 0 ? 0 : many - 1) : current + moves[event.key])), true);
    else if (event.key === "Home") go(0, true);
    else if (event.key === "End") go(many - 1, true);
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
  });
}

function nearestIndex(values, wanted) {
  let best = 0;
  values.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i; });
  return best;
}

function frame(holder, width, height, margin, label) {
  const picture = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, xmlns: "http://www.w3.org/2000/svg" });
  picture.append(shape("rect", { x: 0, y: 0, width, height, fill: "var(--card)" }));
  fill(holder, picture);
  return { picture, left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
}

function text(x, y, content, extra) {
  return shape("text", { x, y, fill: SOFT, "font-family": "system-ui, sans-serif", "font-size": 12, ...extra }, content);
}

function drawValueAxis(area, limits, scale, small) {
  const { ticks, digits } = niceTicks(limits[0], Math.max(limits[1] - 1e-9, limits[0]), small ? 3 : 6);
  for (const tick of ticks) {
    const y = scale(tick);
    area.picture.append(shape("path", { d: `M${area.left},${y}H${area.right}`, stroke: GRID }));
    area.picture.append(text(area.left - 7, y + 4, tick.toFixed(digits), { "text-anchor": "end", "font-size": small ? 10 : 12 }));
  }
}

function stepTicks(xs, many) {
  const { ticks } = niceTicks(xs[0], xs[xs.length - 1], many);
  const wholeTicks = ticks.filter(Number.isInteger);
  return wholeTicks.length > 1 ? wholeTicks : xs;
}

// options: series [{name, look, points: [{x, y, error, note}], bars, dots}], label, xLabel, xTitle(x), limits, log, small, marks, digits
function lineChart(holder, options) {
  const small = options.small;
  const width = Math.max(holder.clientWidth, 200);
  const height = options.height || (small ? 170 : Math.max(260, Math.min(420, width * 0.48)));
  const margin = small ? { left: 36, right: 16, top: 6, bottom: 22 } : { left: 50, right: 14, top: 10, bottom: 42 };
  const area = frame(holder, width, height, margin, options.label);
  const xs = ascending(options.series.flatMap((series) => series.points.map((point) => point.x)));
  if (!xs.length) {
    fill(holder, element("p", { class: "empty" }, "Nothing to show: turn on an approximation that was measured here."));
    return;
  }
  const warp = options.log ? Math.log2 : (value) => value;
  const ends = [warp(xs[0]), warp(xs[xs.length - 1])];
  const pad = (ends[1] - ends[0] || 1) * (options.pad ?? 0.02);
  const across = linearScale(ends[0] - pad, ends[1] + pad, area.left, area.right);
  const x = (value) => across(warp(value));
  const y = linearScale(options.limits[0], options.limits[1], area.bottom, area.top);
  drawValueAxis(area, options.limits, y, small);
  const ticks = options.ticks || (options.log ? xs : stepTicks(xs, small ? 3 : Math.min(9, width / 80)));
  const skip = Math.ceil(ticks.length / (small ? 4 : Math.max(4, width / 70)));
  ticks.forEach((tick, i) => {
    if (i % skip) return;
    area.picture.append(shape("path", { d: `M${x(tick)},${area.bottom}v5`, stroke: LINE }));
    area.picture.append(text(x(tick), area.bottom + 17, options.tickText ? options.tickText(tick) : shortStep(tick), { "text-anchor": "middle", "font-size": small ? 10 : 12 }));
  });
  area.picture.append(shape("path", { d: `M${area.left},${area.top}V${area.bottom}H${area.right}`, fill: "none", stroke: LINE }));
  if (!small) {
    area.picture.append(text((area.left + area.right) / 2, height - 6, options.xLabel, { "text-anchor": "middle" }));
    area.picture.append(text(0, 0, options.yLabel || "cosine similarity", { "text-anchor": "middle", transform: `translate(12,${(area.top + area.bottom) / 2}) rotate(-90)` }));
  }
  for (const mark of options.marks || []) {
    area.picture.append(shape("path", { d: `M${x(mark.x)},${area.top}V${area.bottom}`, stroke: "var(--faint)", "stroke-dasharray": "2 3" }));
    area.picture.append(text(0, 0, mark.name, { "font-size": 11, transform: `translate(${x(mark.x) - 4},${area.bottom - 6}) rotate(-90)` }));
  }
  for (const series of options.series) drawSeries(area, series, x, y, small);
  const guide = shape("path", { stroke: "var(--faint)", "stroke-dasharray": "3 3", d: "" });
  const rings = shape("g", {});
  area.picture.append(guide, rings);
  const tip = tipFor(holder);
  const hide = () => { tip.hide(); guide.setAttribute("d", ""); rings.replaceChildren(); };
  const places = xs.map(x);
  const choose = (place, aloud) => {
    const found = options.series.filter((series) => !series.silent).map((series) => ({ series, point: series.points.find((point) => point.x === xs[place]) }))
      .filter(({ point }) => point && (isNumber(point.y) || point.note))
      .sort((a, b) => (b.point.y ?? -1) - (a.point.y ?? -1)).slice(0, 16);
    guide.setAttribute("d", `M${places[place]},${area.top}V${area.bottom}`);
    fill(rings, found.filter(({ point }) => isNumber(point.y)).map(({ series, point }) => shape("circle", { cx: places[place], cy: y(point.y), r: 7, fill: "none", stroke: series.look.color, "stroke-width": 1.5 })));
    const lines = found.map(({ series, point }) => ({ look: series.look, name: series.name, value: withError(point.y, point.error), note: isNumber(point.y) ? "" : point.note }));
    const title = options.xTitle(xs[place]);
    const scaled = holder.clientWidth / width;
    tip.show(title, lines, places[place] * scaled, (area.top + 60) * scaled);
    if (aloud) speak(`${title}: ${lines.map((line) => `${line.name} ${line.value}`).join(", ")}`);
  };
  const nearest = (px, py) => (py > height + 10 ? -1 : nearestIndex(places, px * (width / holder.clientWidth)));
  choosing(holder, xs.length, nearest, choose, hide);
}

function drawSeries(area, series, x, y, small) {
  const { look } = series;
  const points = series.points.filter((point) => isNumber(point.y));
  const group = shape("g", { "data-series": series.name });
  area.picture.append(group);
  if (series.bars) {
    const wide = Math.max(4, Math.min(26, 0.6 * (x(2) - x(1))));
    for (const point of points) group.append(shape("rect", { x: x(point.x) - wide / 2, y: y(point.y), width: wide, height: Math.max(0, y(0) - y(point.y)), fill: look.color }));
    return;
  }
  if (!series.dots && points.length > 1) {
    const path = points.map((point, i) => `${i ? "L" : "M"}${x(point.x).toFixed(2)},${y(point.y).toFixed(2)}`).join("");
    group.append(shape("path", { d: path, fill: "none", stroke: look.color, "stroke-width": look.width * (small ? 0.85 : 1.15), "stroke-dasharray": (look.dashes || []).map((part) => part * 1.6).join(" "), "stroke-linejoin": "round" }));
  }
  for (const point of points) {
    if (!isNumber(point.error) || small) continue;
    const [low, high] = [y(point.y - point.error), y(point.y + point.error)];
    group.append(shape("path", { d: `M${x(point.x)},${low}V${high}m-3,0h6M${x(point.x) - 3},${low}h6`, stroke: look.color, fill: "none", "stroke-width": 1.2, class: "error-bar" }));
  }
  if (series.plain) return;
  const every = Math.max(1, Math.ceil(points.length / (small ? 8 : 40)));
  points.forEach((point, i) => { if (i % every === 0 || points.length - 1 === i) group.append(marker(look, x(point.x), y(point.y), small ? 2.6 : look.width > 2 ? 4.6 : 3.8)); });
}

// lines: [{name, dots: [{name, look, x, error, note}]}]: one line per layer (or approximation), its values across.
function dotChart(holder, { lines, label, limits }) {
  const width = Math.max(holder.clientWidth, 260);
  const longest = Math.max(...lines.map((line) => line.name.length), 4);
  const left = Math.min(longest * 6.6 + 16, width * 0.42);
  const band = Math.max(26, Math.min(44, 300 / lines.length));
  const height = lines.length * band + 54;
  const area = frame(holder, width, height, { left, right: 16, top: 8, bottom: 46 }, label);
  const x = linearScale(limits[0], limits[1], area.left, area.right);
  const { ticks, digits } = niceTicks(limits[0], limits[1] - 1e-9, Math.max(3, Math.min(8, (width - left) / 70)));
  const letters = Math.floor((left - 14) / 6.6);
  lines.forEach((line, i) => {
    if (i % 2 === 0) area.picture.append(shape("rect", { x: area.left, y: area.top + i * band, width: area.right - area.left, height: band, fill: "var(--grid)", opacity: 0.5 }));
    const name = line.name.length > letters ? `…${line.name.slice(1 - letters)}` : line.name;
    const node = text(area.left - 8, area.top + (i + 0.5) * band + 4, name, { "text-anchor": "end", fill: INK });
    node.append(shape("title", {}, line.name));
    area.picture.append(node);
  });
  for (const tick of ticks) {
    area.picture.append(shape("path", { d: `M${x(tick)},${area.top}V${area.bottom}`, stroke: GRID }));
    area.picture.append(text(x(tick), area.bottom + 17, tick.toFixed(digits), { "text-anchor": "middle" }));
  }
  area.picture.append(shape("path", { d: `M${area.left},${area.top}V${area.bottom}H${area.right}`, fill: "none", stroke: LINE }));
  area.picture.append(text((area.left + area.right) / 2, height - 6, "cosine similarity", { "text-anchor": "middle" }));
  lines.forEach((line, i) => {
    // Side by side within the band, so that equal cosines do not hide each other.
    const shown = line.dots.filter((dot) => isNumber(dot.x));
    shown.forEach((dot, place) => {
      const y = area.top + (i + 0.5) * band + (shown.length > 1 ? (place / (shown.length - 1) - 0.5) * band * 0.5 : 0);
      const group = shape("g", { "data-series": dot.name });
      if (isNumber(dot.error)) group.append(shape("path", { d: `M${x(dot.x - dot.error)},${y}H${x(dot.x + dot.error)}m0,-3v6M${x(dot.x - dot.error)},${y - 3}v6`, stroke: dot.look.color, fill: "none", "stroke-width": 1.2, class: "error-bar" }));
      group.append(marker(dot.look, x(dot.x), y, 4.4));
      area.picture.append(group);
    });
  });
  const ring = shape("rect", { x: area.left, width: area.right - area.left, height: band, fill: "none", stroke: "var(--faint)", "stroke-dasharray": "3 3", visibility: "hidden" });
  area.picture.append(ring);
  const tip = tipFor(holder);
  const choose = (place, aloud, pointer) => {
    const line = lines[place];
    const scaled = holder.clientWidth / width;
    ring.setAttribute("y", area.top + place * band);
    ring.setAttribute("visibility", "visible");
    const found = [...line.dots].sort((a, b) => (b.x ?? -1) - (a.x ?? -1)).map((dot) => ({ look: dot.look, name: dot.name, value: withError(dot.x, dot.error), note: isNumber(dot.x) ? "" : dot.note }));
    tip.show(line.title || line.name, found, pointer ?? ((area.left + area.right) / 2) * scaled, (area.top + place * band) * scaled, (area.top + (place + 1) * band) * scaled);
    if (aloud) speak(`${line.name}: ${found.map((dot) => `${dot.name} ${dot.value}`).join(", ")}`);
  };
  const hide = () => { tip.hide(); ring.setAttribute("visibility", "hidden"); };
  const nearest = (px, py) => {
    const place = Math.floor((py * (width / holder.clientWidth) - area.top) / band);
    return place >= 0 && place < lines.length ? place : -1;
  };
  choosing(holder, lines.length, nearest, choose, hide);
}
