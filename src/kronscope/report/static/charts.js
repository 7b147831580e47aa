// The two kinds of chart, as SVG: values along an axis, and values of layers below each other.

// options: series [{name, look, points: [{x, y, error, note}], bars, dots}], label, xLabel, xTitle(x), limits, log, small, marks, valueText(y)
function lineChart(holder, options) {
  const small = options.small;
  const width = Math.max(holder.clientWidth, 200);
  const height = options.height || (small ? 170 : Math.max(260, Math.min(420, width * 0.48)));
  const margin = small ? { left: 36, right: 16, top: 6, bottom: 22 } : { left: 58, right: 14, top: 10, bottom: 42 };
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
  drawValueAxis(area, options.limits, y, small, options.valueText);
  const ticks = options.ticks || (options.log ? xs : stepTicks(xs, small ? 3 : Math.min(9, width / 80)));
  const skip = Math.ceil(ticks.length / (small ? 4 : Math.max(4, width / 70)));
  ticks.forEach((tick, i) => {
    if (i % skip) return;
    area.picture.append(shape("path", { d: `M${x(tick)},${area.bottom}v5`, stroke: LINE }));
    area.picture.append(
      text(x(tick), area.bottom + 17, options.tickText ? options.tickText(tick) : shortStep(tick), {
        "text-anchor": "middle",
        "font-size": small ? 10 : 12,
      }),
    );
  });
  area.picture.append(
    shape("path", { d: `M${area.left},${area.top}V${area.bottom}H${area.right}`, fill: "none", stroke: LINE }),
  );
  if (!small) {
    area.picture.append(text((area.left + area.right) / 2, height - 6, options.xLabel, { "text-anchor": "middle" }));
    area.picture.append(
      text(0, 0, options.yLabel ?? "cosine similarity", {
        "text-anchor": "middle",
        transform: `translate(12,${(area.top + area.bottom) / 2}) rotate(-90)`,
      }),
    );
  }
  for (const mark of options.marks || []) {
    area.picture.append(
      shape("path", {
        d: `M${x(mark.x)},${area.top}V${area.bottom}`,
        stroke: "var(--faint)",
        "stroke-dasharray": "2 3",
      }),
    );
    area.picture.append(
      text(0, 0, mark.name, {
        "font-size": 11,
        transform: `translate(${x(mark.x) - 4},${area.bottom - 6}) rotate(-90)`,
      }),
    );
  }
  for (const series of options.series) drawSeries(area, series, x, y, small);
  const guide = shape("path", { stroke: "var(--faint)", "stroke-dasharray": "3 3", d: "" });
  const rings = shape("g", {});
  area.picture.append(guide, rings);
  const tip = tipFor(holder);
  const hide = () => {
    tip.hide();
    guide.setAttribute("d", "");
    rings.replaceChildren();
  };
  const places = xs.map(x);
  const choose = (place, aloud) => {
    const found = options.series
      .filter((series) => !series.silent)
      .map((series) => ({ series, point: series.points.find((point) => point.x === xs[place]) }))
      .filter(({ point }) => point && (isNumber(point.y) || point.note))
      .sort((a, b) => (b.point.y ?? -1) - (a.point.y ?? -1))
      .slice(0, 16);
    guide.setAttribute("d", `M${places[place]},${area.top}V${area.bottom}`);
    fill(
      rings,
      found
        .filter(({ point }) => isNumber(point.y))
        .map(({ series, point }) =>
          shape("circle", {
            cx: places[place],
            cy: y(point.y),
            r: 7,
            fill: "none",
            stroke: series.look.color,
            "stroke-width": 1.5,
          }),
        ),
    );
    const lines = found.map(({ series, point }) => ({
      look: series.look,
      name: series.name,
      value: options.valueText ? options.valueText(point.y) : withError(point.y, point.error),
      note: isNumber(point.y) ? "" : point.note,
    }));
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
    for (const point of points)
      group.append(
        shape("rect", {
          x: x(point.x) - wide / 2,
          y: y(point.y),
          width: wide,
          height: Math.max(0, y(0) - y(point.y)),
          fill: look.color,
        }),
      );
    return;
  }
  if (!series.dots && points.length > 1) {
    const path = points.map((point, i) => `${i ? "L" : "M"}${x(point.x).toFixed(2)},${y(point.y).toFixed(2)}`).join("");
    group.append(
      shape("path", {
        d: path,
        fill: "none",
        stroke: look.color,
        "stroke-width": look.width * (small ? 0.85 : 1.15),
        "stroke-dasharray": (look.dashes || []).map((part) => part * 1.6).join(" "),
        "stroke-linejoin": "round",
      }),
    );
  }
  for (const point of points) {
    if (!isNumber(point.error) || small) continue;
    const [low, high] = [y(point.y - point.error), y(point.y + point.error)];
    group.append(
      shape("path", {
        d: `M${x(point.x)},${low}V${high}m-3,0h6M${x(point.x) - 3},${low}h6`,
        stroke: look.color,
        fill: "none",
        "stroke-width": 1.2,
        class: "error-bar",
      }),
    );
  }
  if (series.plain) return;
  const every = Math.max(1, Math.ceil(points.length / (small ? 8 : 40)));
  points.forEach((point, i) => {
    if (i % every === 0 || points.length - 1 === i)
      group.append(marker(look, x(point.x), y(point.y), small ? 2.6 : look.width > 2 ? 4.6 : 3.8));
  });
}

// lines: [{name, dots: [{name, look, x, error, note}]}]: one line per layer (or approximation), its values across; short:
// labels of names for where there is less room.
function dotChart(holder, { lines, label, limits, short }) {
  const width = Math.max(holder.clientWidth, 260);
  const names = labelsFor(lines.map((line) => line.name), short || new Map(), 12, Math.min(290, width * 0.42 - 16));
  const left = Math.min(Math.max(names.width, 20) + 16, width * 0.5);
  const band = Math.max(26, Math.min(44, 300 / lines.length));
  const height = lines.length * band + 54;
  const area = frame(holder, width, height, { left, right: 16, top: 8, bottom: 46 }, label);
  const x = linearScale(limits[0], limits[1], area.left, area.right);
  const { ticks, digits } = niceTicks(limits[0], limits[1] - 1e-9, Math.max(3, Math.min(8, (width - left) / 70)));
  const letters = Math.max(8, Math.floor(((left - 14) / Math.max(names.width, 1)) * Math.max(...names.texts.map((name) => name.length))));
  lines.forEach((line, i) => {
    if (i % 2 === 0)
      area.picture.append(
        shape("rect", {
          x: area.left,
          y: area.top + i * band,
          width: area.right - area.left,
          height: band,
          fill: "var(--grid)",
          opacity: 0.5,
        }),
      );
    const own = names.texts[i];
    const name = names.width > left - 14 && own.length > letters ? `…${own.slice(1 - letters)}` : own;
    const node = text(area.left - 8, area.top + (i + 0.5) * band + 4, name, { "text-anchor": "end", fill: INK });
    node.append(shape("title", {}, line.name));
    area.picture.append(node);
  });
  for (const tick of ticks) {
    area.picture.append(shape("path", { d: `M${x(tick)},${area.top}V${area.bottom}`, stroke: GRID }));
    area.picture.append(text(x(tick), area.bottom + 17, tick.toFixed(digits), { "text-anchor": "middle" }));
  }
  area.picture.append(
    shape("path", { d: `M${area.left},${area.top}V${area.bottom}H${area.right}`, fill: "none", stroke: LINE }),
  );
  area.picture.append(text((area.left + area.right) / 2, height - 6, "cosine similarity", { "text-anchor": "middle" }));
  lines.forEach((line, i) => {
    // Side by side within the band, so that equal cosines do not hide each other.
    const shown = line.dots.filter((dot) => isNumber(dot.x));
    shown.forEach((dot, place) => {
      const y = area.top + (i + 0.5) * band + (shown.length > 1 ? (place / (shown.length - 1) - 0.5) * band * 0.5 : 0);
      const group = shape("g", { "data-series": dot.name });
      if (isNumber(dot.error))
        group.append(
          shape("path", {
            d: `M${x(dot.x - dot.error)},${y}H${x(dot.x + dot.error)}m0,-3v6M${x(dot.x - dot.error)},${y - 3}v6`,
            stroke: dot.look.color,
            fill: "none",
            "stroke-width": 1.2,
            class: "error-bar",
          }),
        );
      group.append(marker(dot.look, x(dot.x), y, 4.4));
      area.picture.append(group);
    });
  });
  const ring = shape("rect", {
    x: area.left,
    width: area.right - area.left,
    height: band,
    fill: "none",
    stroke: "var(--faint)",
    "stroke-dasharray": "3 3",
    visibility: "hidden",
  });
  area.picture.append(ring);
  const tip = tipFor(holder);
  const choose = (place, aloud, pointer) => {
    const line = lines[place];
    const scaled = holder.clientWidth / width;
    ring.setAttribute("y", area.top + place * band);
    ring.setAttribute("visibility", "visible");
    const found = [...line.dots]
      .sort((a, b) => (b.x ?? -1) - (a.x ?? -1))
      .map((dot) => ({
        look: dot.look,
        name: dot.name,
        value: withError(dot.x, dot.error),
        note: isNumber(dot.x) ? "" : dot.note,
      }));
    tip.show(
      line.title || line.name,
      found,
      pointer ?? ((area.left + area.right) / 2) * scaled,
      (area.top + place * band) * scaled,
      (area.top + (place + 1) * band) * scaled,
    );
    if (aloud) speak(`${line.name}: ${found.map((dot) => `${dot.name} ${dot.value}`).join(", ")}`);
  };
  const hide = () => {
    tip.hide();
    ring.setAttribute("visibility", "hidden");
  };
  const nearest = (px, py) => {
    const place = Math.floor((py * (width / holder.clientWidth) - area.top) / band);
    return place >= 0 && place < lines.length ? place : -1;
  };
  choosing(holder, lines.length, nearest, choose, hide);
}
