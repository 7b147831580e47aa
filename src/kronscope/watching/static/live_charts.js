// The pictures of the live page: the heat map of all layers over time, curves of some, and numbers of the whole run.

// ------------------------------------------------------------------ the heat map

function drawMap(number, order) {
  const records = having(number);
  const values = order.map((place) => records.map((record) => scaled(number, (record.numbers[number] || [])[place])));
  const limits = limitsOf(number, values.flat());
  const bad = (value) => {
    const part = (value - limits[0]) / (limits[1] - limits[0] || 1);
    return NUMBERS[number].bad > 0 ? part : 1 - part;
  };
  const canvas = element("canvas", { width: Math.max(records.length, 1), height: order.length });
  const paint = canvas.getContext("2d");
  values.forEach((row, y) =>
    row.forEach((value, x) => {
      if (value === null) return;
      paint.fillStyle = shade(bad(value));
      paint.fillRect(x, y, 1, 1);
    }),
  );
  canvas.style.height = `${20 * order.length}px`;
  canvas.style.imageRendering = "pixelated";
  const cells = element(
    "div",
    {
      class: "cells",
      tabindex: 0,
      role: "img",
      "aria-label": `${NUMBERS[number].title} of ${order.length} layers at ${records.length} steps; arrow keys go through the cells`,
    },
    canvas,
  );
  const tip = tipFor(cells);
  let at = null;
  const show = (row, column, aloud) => {
    at = [row, column];
    const record = records[column];
    const name = LAYERS[order[row]].name;
    const value = (record.numbers[number] || [])[order[row]];
    const color = value === null ? "none" : shade(bad(scaled(number, value) ?? limits[0]));
    const line = { look: { color }, name: NUMBERS[number].title, value: brief(value) };
    const x = ((column + 0.5) / records.length) * cells.clientWidth;
    tip.show(`${name}, step ${whole(record.step)}`, [line], x, 20 * row, 20 * row + 20);
    if (aloud) speak(`${name}, step ${record.step}: ${line.value}`);
  };
  cells.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * records.length);
    const row = Math.floor((event.clientY - box.top) / 20);
    if (row >= 0 && row < order.length && column >= 0 && column < records.length) show(row, column, false);
  });
  cells.addEventListener("pointerleave", () => tip.hide());
  cells.addEventListener("blur", () => tip.hide());
  cells.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    const move = moves[event.key];
    if (!move || !records.length) return;
    const [row, column] = at ? [at[0] + move[0], at[1] + move[1]] : [0, records.length - 1];
    show(Math.max(0, Math.min(order.length - 1, row)), Math.max(0, Math.min(records.length - 1, column)), true);
    event.preventDefault();
  });
  const ends = NUMBERS[number].bad > 0 ? limits : [limits[1], limits[0]];
  const ramp = element("canvas", { class: "ramp", width: 60, height: 1, "aria-hidden": "true" });
  for (let x = 0; x < 60; x += 1) {
    const brush = ramp.getContext("2d");
    brush.fillStyle = shade(x / 59);
    brush.fillRect(x, 0, 1, 1);
  }
  const key = element(
    "span",
    { class: "ramp-key" },
    brief(unscaled(number, ends[0])),
    ramp,
    `${brief(unscaled(number, ends[1]))} (worse)`,
  );
  const first = records.length ? `step ${whole(records[0].step)}` : "",
    last = records.length ? `step ${whole(records[records.length - 1].step)}` : "";
  const names = element(
    "div",
    { class: "names" },
    shortNames(order).map((label, i) => nameButton(order[i], {}, label)),
  );
  const under = element("div", { class: "under" }, element("span", {}, first), key, element("span", {}, last));
  fill(byId("map"), element("div", { class: "map" }, names, cells, under));
}

// Names of layers as long as the map has room for, which is what live.css gives them.
function shortNames(order) {
  const room = Math.min(290, 0.4 * byId("map").clientWidth);
  const labels = new Map(LAYERS.map((layer) => [layer.name, layer.short]));
  return labelsFor(order.map((place) => LAYERS[place].name), labels, 12.8, room).texts;
}

function nameButton(place, attributes, label) {
  const { name } = LAYERS[place];
  const pressed = state.layer === place;
  return element(
    "button",
    {
      type: "button",
      title: name,
      "aria-pressed": String(pressed),
      onclick: () => {
        state.layer = pressed ? null : place;
        draw();
      },
      ...attributes,
    },
    label ? [label] : breakable(name),
  );
}

// ------------------------------------------------------------------ curves

function look(place) {
  return { color: `var(--series-${place % SERIES})`, marker: "o", dashes: [], width: 1.6 };
}

function drawCurves(number, order) {
  const chosen = state.layer === null ? order.slice(0, SERIES) : [state.layer];
  let lines = chosen.map((place, i) => ({ name: LAYERS[place].name, number, place, look: look(i) }));
  if (number === "cosine_live" && state.layer !== null)
    lines = ["cosine_optimal", "cosine_shampoo2", "cosine_live"].map((one, i) => ({
      name: NUMBERS[one].title,
      number: one,
      place: state.layer,
      look: look(i),
    }));
  const series = lines
    .map((line) => ({
      name: line.name,
      look: line.look,
      plain: true,
      points: having(line.number).map((record) => ({
        x: record.step,
        y: scaled(number, (record.numbers[line.number] || [])[line.place]),
      })),
    }))
    .filter((one) => one.points.some((point) => isNumber(point.y)));
  const values = series.flatMap((one) => one.points.map((point) => point.y));
  const holder = element("div", { class: "chart", tabindex: 0 });
  fill(byId("view"), holder);
  lineChart(holder, {
    series,
    label: `${NUMBERS[number].title} of ${series.map((one) => one.name).join(", ")} over the steps`,
    xLabel: "training step",
    yLabel: "",
    xTitle: (step) => `Step ${whole(step)}`,
    limits: limitsOf(number, values),
    valueText: (value) => brief(isNumber(value) ? unscaled(number, value) : value),
    height: 260,
  });
  fill(
    byId("legend"),
    series.map((one) => element("span", { class: "key" }, swatch(one.look), one.name)),
    state.layer === null
      ? LAYERS.length > SERIES
        ? element("span", { class: "key" }, `the ${series.length} worst of ${LAYERS.length}; press a name for one alone`)
        : null
      : element(
          "button",
          {
            type: "button",
            class: "text",
            onclick: () => {
              state.layer = null;
              draw();
            },
          },
          "the worst layers again",
        ),
  );
}

function drawRun() {
  const names = unique(state.records.flatMap((record) => Object.keys(record.run))).filter(
    (name) => !["watching_seconds", "training_seconds", "measuring_seconds"].includes(name),
  );
  byId("run-section").hidden = !names.length;
  const every = Math.ceil(state.records.length / MOST_POINTS);
  const records = state.records.filter((_, i) => (state.records.length - 1 - i) % every === 0);
  fill(byId("run"));
  for (const name of names) {
    const holder = element("div", { class: "chart", tabindex: 0 });
    byId("run").append(
      element("div", { class: "panel" }, element("h3", {}, RUN_TITLES[name] || name.replaceAll("_", " ")), holder),
    );
    const points = records.map((record) => ({ x: record.step, y: record.run[name] ?? null }));
    lineChart(holder, {
      series: [{ name: RUN_TITLES[name] || name, look: look(0), plain: true, points }],
      label: `${name} over the steps`,
      xTitle: (step) => `Step ${whole(step)}`,
      limits: limitsOf(name, points.map((point) => point.y)),
      valueText: brief,
      small: true,
    });
  }
}
