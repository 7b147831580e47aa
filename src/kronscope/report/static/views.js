// What can be looked at: each view says when it exists, which choices it has, and how to draw itself.
const state = { view: null, run: 0, layer: null, condition: null, step: null, part: 0, hidden: new Set(), fit: false };
const MOST_PANELS = 48;

function detailsOf(kind) {
  return RUNS.flatMap((run, r) =>
    run.details.filter((detail) => detail.kind === kind).map((detail) => ({ ...detail, run: r })),
  );
}

const DETAILS = {
  exponents: detailsOf("exponents"),
  batch_sizes: detailsOf("batch_sizes"),
  spectrum: detailsOf("spectrum"),
};

function panels() {
  const found = [];
  for (const [condition, rows] of grouped(ROWS, (row) => row.condition))
    for (const [run, own] of grouped(rows, (row) => row.run))
      for (const [layer, series] of grouped(own, (row) => row.layer))
        if (series.some((row) => row.step !== series[0].step)) found.push({ run, layer, condition, rows: series });
  return found;
}

const PANELS = panels();
const MANY_LAYERS = RUNS.some((run) => run.layers > 1);

const VIEWS = {
  overview: {
    title: "Overview",
    exists: PANELS.length > 1,
    items: () => ROWS,
    choices: [],
    legend: true,
    draw: drawOverview,
  },
  training: {
    title: "Over training",
    exists: PANELS.length > 0,
    items: () => PANELS.flatMap((panel) => panel.rows),
    choices: ["run", "layer", "condition"],
    legend: true,
    draw: drawTraining,
  },
  layers: {
    title: MANY_LAYERS ? "Across layers" : "At one step",
    exists: ROWS.length > 0,
    items: () => ROWS,
    choices: ["run", "condition", "step", "part"],
    legend: true,
    draw: drawLayers,
  },
  exponents: {
    title: "Exponents",
    exists: DETAILS.exponents.length > 0,
    items: () => DETAILS.exponents,
    choices: ["run", "layer", "condition"],
    draw: drawExponents,
  },
  batch_sizes: {
    title: "Batch sizes",
    exists: DETAILS.batch_sizes.length > 0,
    items: () => DETAILS.batch_sizes,
    choices: ["run", "layer", "condition", "step"],
    legend: true,
    draw: drawBatchSizes,
  },
  spectrum: {
    title: "Spectrum",
    exists: DETAILS.spectrum.length > 0,
    items: () => DETAILS.spectrum,
    choices: ["run", "layer", "condition", "step"],
    draw: drawSpectrum,
  },
};

function matches(item, names) {
  return names.every((name) => item[name] === state[name]);
}

// The possible values of each choice, given the choices before it; a value that is not there any more is replaced.
function settle(view) {
  const options = {};
  let items = view.items();
  for (const name of view.choices) {
    const values = unique(items.map((item) => item[name]));
    options[name] = name === "step" ? ascending(values) : values;
    if (!values.includes(state[name]))
      state[name] = name === "step" ? options[name][options[name].length - 1] : values[0];
    items = items.filter((item) => item[name] === state[name]);
  }
  return { options, items };
}

function seriesBy(rows, horizontal) {
  return NAMES.filter((name) => !state.hidden.has(name))
    .map((name) => ({
      name: STYLES[name].name,
      look: STYLES[name],
      points: rows
        .filter((row) => row.approximation === name)
        .map((row) => ({ x: row[horizontal], y: row.cosine, error: row.stderr, note: row.note }))
        .sort((a, b) => a.x - b.x),
    }))
    .filter((series) => series.points.length);
}

function visible(rows) {
  return rows.filter((row) => !state.hidden.has(row.approximation));
}

function chartHolder(label) {
  return element("div", {
    class: "chart",
    tabindex: 0,
    role: "group",
    "aria-label": `${label}. Arrow keys read the values.`,
  });
}

function samplesOf(rows) {
  const counts = ascending(rows.filter((row) => isNumber(row.cosine)).map((row) => row.samples));
  if (!counts.length) return "";
  return counts.length === 1
    ? `${whole(counts[0])} samples`
    : `${whole(counts[0])} to ${whole(counts[counts.length - 1])} samples`;
}

function where(parts) {
  const named = RUNS.length > 1 ? [RUNS[state.run].name] : [];
  return [...named, ...parts].filter(Boolean).join(" · ");
}

function shapeOf(row) {
  return `${row.layer} (${row.rows}\u00a0×\u00a0${row.cols})`;
}

function drawOverview(view) {
  const shown = PANELS.slice(0, MOST_PANELS);
  const limits = cosineLimits(
    visible(shown.flatMap((panel) => panel.rows)).map((row) => row.cosine),
    state.fit,
  );
  const columns = unique(shown.map((panel) => JSON.stringify([panel.run, panel.layer]))).length;
  // Several layers: as in the paper, one group for each matrix. A single one: the matrices beside each other.
  const groups =
    columns > 1
      ? unique(shown.map((panel) => panel.condition)).map((condition) =>
          shown.filter((panel) => panel.condition === condition),
        )
      : [shown];
  const holders = [];
  fill(
    view,
    groups.map((group) => {
      const grid = element("div", { class: group.length <= (columns > 1 ? 2 : 4) ? "panels few" : "panels" });
      // As many columns as fit, but no single panel left over in a last row of its own.
      const room = Math.max(1, Math.min(4, Math.floor(view.clientWidth / 250)));
      if (grid.className === "panels")
        grid.style.gridTemplateColumns = `repeat(${Math.ceil(group.length / Math.ceil(group.length / room))}, minmax(0, 1fr))`;
      for (const panel of group) {
        const names = [RUNS.length > 1 ? RUNS[panel.run].name : "", panel.layer].filter(Boolean).join(" · ");
        const label = `${conditionName(panel.condition)}, ${names}`;
        const holder = chartHolder(label);
        const open = () => {
          Object.assign(state, { view: "training", run: panel.run, layer: panel.layer, condition: panel.condition });
          render();
          byId("tab-training").focus();
        };
        grid.append(
          element(
            "div",
            { class: "panel" },
            element(
              "h3",
              {},
              element(
                "button",
                { type: "button", onclick: open, title: "Open this panel", "aria-label": `Open ${label}` },
                breakable(columns > 1 ? names : conditionName(panel.condition)),
              ),
            ),
            holder,
          ),
        );
        holders.push([holder, panel, label]);
      }
      return columns > 1 ? [element("h3", { class: "group" }, conditionName(group[0].condition)), grid] : grid;
    }),
  );
  for (const [holder, panel, label] of holders) {
    const height = holder.clientWidth > 340 ? 210 : 170;
    lineChart(holder, {
      series: seriesBy(panel.rows, "step"),
      label,
      limits,
      height,
      small: true,
      xTitle: (step) => `Step ${whole(step)}`,
    });
  }
  const more =
    PANELS.length > MOST_PANELS
      ? ` The first ${MOST_PANELS} of ${PANELS.length} panels are shown; the other views have all.`
      : "";
  const layer = columns > 1 ? "" : ` of ${shown[0].layer}`;
  return {
    rows: shown.flatMap((panel) => panel.rows),
    caption: `Cosine${layer} against the training step, all panels on the same scale. Press a panel's title to open it.${more}`,
  };
}

function drawTraining(view, rows) {
  const label = `Cosine against step, ${conditionName(state.condition)}, ${state.layer}`;
  const holder = chartHolder(label);
  fill(view, holder);
  lineChart(holder, {
    series: seriesBy(rows, "step"),
    label,
    xLabel: "step",
    xTitle: (step) => `Step ${whole(step)}`,
    limits: cosineLimits(visible(rows).flatMap(reach), state.fit),
  });
  return {
    rows,
    caption: `Cosine with the true matrix against the training step: ${where([conditionName(state.condition), shapeOf(rows[0]), samplesOf(rows)])}.`,
  };
}

// Only a fitted axis makes room for the ends of the error bars; the others have it.
function reach(row) {
  return isNumber(row.stderr) && state.fit ? [row.cosine - row.stderr, row.cosine + row.stderr] : [row.cosine];
}

function drawLayers(view, rows) {
  const layers = unique(rows.map((row) => row.layer));
  const shown = visible(rows);
  const dot = (row) => ({
    name: STYLES[row.approximation].name,
    look: STYLES[row.approximation],
    x: row.cosine,
    error: row.stderr,
    note: row.note,
  });
  const ordered = NAMES.flatMap((name) => shown.filter((row) => row.approximation === name));
  const dots = grouped(ordered, (row) => row.layer);
  const lines =
    layers.length > 1
      ? [...grouped(rows, (row) => row.layer)].map(([layer, own]) => ({
          name: layer,
          title: shapeOf(own[0]),
          dots: (dots.get(layer) || []).map(dot),
        }))
      : ordered.map((row) => ({ name: STYLES[row.approximation].name, dots: [dot(row)] }));
  const label = `Cosine of each ${layers.length > 1 ? "layer" : "approximation"} at step ${state.step}, ${conditionName(state.condition)}`;
  const holder = chartHolder(label);
  fill(view, holder);
  if (lines.length) dotChart(holder, { lines, label, limits: cosineLimits(shown.flatMap(reach), state.fit), short: RUNS[state.run].short });
  else fill(holder, element("p", { class: "empty" }, "Nothing to show: turn on an approximation."));
  const layer = layers.length > 1 ? "" : shapeOf(rows[0]);
  return {
    rows,
    caption: `Cosine with the true matrix at step ${whole(state.step)}: ${where([conditionName(state.condition), layer, samplesOf(rows)])}.`,
  };
}
