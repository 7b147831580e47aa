// What charts are made of: markers, scales, axes, tips. Colours are variables of the page, so the scheme can change
// without drawing again.
const INK = "var(--ink)",
  SOFT = "var(--soft)",
  GRID = "var(--grid)",
  LINE = "var(--line)";

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
    d: draw(x, y, radius),
    fill: hollow ? "var(--card)" : look.color,
    stroke: look.color,
    "stroke-width": hollow ? 1.6 : 0.6,
  });
}

function swatch(look) {
  const picture = shape("svg", { width: 26, height: 14, viewBox: "0 0 26 14", "aria-hidden": "true" });
  if (look.line !== false) {
    picture.append(
      shape("path", {
        d: "M1,7H25",
        stroke: look.color,
        "stroke-width": look.width,
        "stroke-dasharray": (look.dashes || []).join(" "),
      }),
    );
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
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + 1e-9 * span; i += 1)
    ticks.push(+(i * size).toPrecision(12));
  return {
    ticks,
    digits: Math.max(0, Math.min(8, Math.ceil(-Math.log10(size) - 1e-9) + (/25/.test(String(size)) ? 1 : 0))),
  };
}

function linearScale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

// From 0 to 1, or closer when all values are near 1; with `fit`, as close as the values allow.
function cosineLimits(values, fit) {
  const finite = values.filter(isNumber);
  if (!finite.length) return [0, 1.03];
  const low = Math.min(...finite),
    high = Math.max(...finite);
  if (fit) {
    const pad = Math.max(0.06 * (high - low), 0.0005);
    return [low - pad, high + pad];
  }
  if (low >= 0.8) {
    const gap = Math.max(1 - low, 0.001);
    return [1 - 1.25 * gap, Math.max(1 + 0.1 * gap, high + 0.05 * gap)];
  }
  return [low < 0 ? low - 0.03 : 0, Math.max(1.03, high + 0.03)];
}

function tipFor(holder) {
  const tip = element("div", { class: "tip", hidden: true });
  holder.append(tip);
  return {
    hide() {
      tip.hidden = true;
    },
    // Beside the place x, at the height y; or, so as not to cover the line from y to `bottom`, below or above it.
    show(title, lines, x, y, bottom) {
      fill(
        tip,
        element("b", {}, title),
        lines.map((line) =>
          element(
            "div",
            {},
            swatchDot(line.look),
            line.name,
            element("span", {}, line.value),
            line.note ? element("em", {}, line.note) : null,
          ),
        ),
      );
      tip.hidden = false;
      const left = x + 14 + tip.offsetWidth > holder.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
      tip.style.left = `${Math.max(0, Math.min(left, holder.clientWidth - tip.offsetWidth))}px`;
      const box = holder.getBoundingClientRect();
      const above = y - tip.offsetHeight - 6;
      const below =
        box.top + bottom + tip.offsetHeight + 12 > window.innerHeight && box.top + above > 0 ? above : bottom + 6;
      tip.style.top = `${bottom === undefined ? Math.max(0, y - tip.offsetHeight / 2) : below}px`;
    },
  };
}

function swatchDot(look) {
  const picture = shape("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" });
  picture.append(
    look.marker ? marker(look, 7, 7, 4) : shape("rect", { x: 2, y: 2, width: 10, height: 10, fill: look.color }),
  );
  return picture;
}

function speak(text) {
  byId("live").textContent = text;
}

// Hovering, touching, and arrow keys all choose one of the places along an axis.
function choosing(holder, many, nearest, choose, hide) {
  let current = -1,
    pointer = null;
  const go = (place, aloud) => {
    if (place < 0 || place >= many) return;
    current = place;
    choose(place, aloud, aloud ? null : pointer);
  };
  const leave = () => {
    current = -1;
    hide();
  };
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
    if (event.key in moves)
      go(
        Math.max(
          0,
          Math.min(many - 1, current < 0 ? (moves[event.key] > 0 ? 0 : many - 1) : current + moves[event.key]),
        ),
        true,
      );
    else if (event.key === "Home") go(0, true);
    else if (event.key === "End") go(many - 1, true);
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
  });
}

function nearestIndex(values, wanted) {
  let best = 0;
  values.forEach((value, i) => {
    if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i;
  });
  return best;
}

function frame(holder, width, height, margin, label) {
  const picture = shape("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": label,
    xmlns: "http://www.w3.org/2000/svg",
  });
  picture.append(shape("rect", { x: 0, y: 0, width, height, fill: "var(--card)" }));
  fill(holder, picture);
  return { picture, left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
}

function text(x, y, content, extra) {
  return shape(
    "text",
    { x, y, fill: SOFT, "font-family": "system-ui, sans-serif", "font-size": 12, ...extra },
    content,
  );
}

function drawValueAxis(area, limits, scale, small, say) {
  const { ticks, digits } = niceTicks(limits[0], Math.max(limits[1] - 1e-9, limits[0]), small ? 3 : 6);
  for (const tick of ticks) {
    const y = scale(tick);
    area.picture.append(shape("path", { d: `M${area.left},${y}H${area.right}`, stroke: GRID }));
    area.picture.append(
      text(area.left - 7, y + 4, say ? say(tick) : tick.toFixed(digits), { "text-anchor": "end", "font-size": small ? 10 : 12 }),
    );
  }
}

function stepTicks(xs, many) {
  const { ticks } = niceTicks(xs[0], xs[xs.length - 1], many);
  const wholeTicks = ticks.filter(Number.isInteger);
  return wholeTicks.length > 1 ? wholeTicks : xs;
}
