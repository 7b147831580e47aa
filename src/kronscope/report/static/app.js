// The page: choices, legend, notes and settings.
function drawTabs() {
  const names = Object.keys(VIEWS).filter((name) => VIEWS[name].exists);
  const open = (name) => {
    state.view = name;
    render();
    byId(`tab-${name}`).focus();
  };
  fill(
    byId("tabs"),
    names.map((name, i) =>
      element(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${name}`,
          "aria-selected": String(name === state.view),
          "aria-controls": "view",
          tabindex: name === state.view ? 0 : -1,
          onclick: () => open(name),
          onkeydown: (event) => {
            const moves = { ArrowRight: 1, ArrowLeft: -1 };
            if (event.key in moves) open(names[(i + moves[event.key] + names.length) % names.length]);
            else if (event.key === "Home") open(names[0]);
            else if (event.key === "End") open(names[names.length - 1]);
            else return;
            event.preventDefault();
          },
        },
        VIEWS[name].title,
      ),
    ),
  );
  byId("tabs").hidden = names.length < 2;
  byId("view").setAttribute("aria-labelledby", `tab-${state.view}`);
}

const CHOICES = {
  run: { title: "Run", text: (value) => RUNS[value].name },
  layer: { title: "Layer", text: (value) => value },
  condition: { title: "Matrix and labels", text: conditionName },
  part: { title: "Layers", text: layersOfPart },
};

function layersOfPart(part) {
  const { layers } = RUNS[state.run];
  return `${whole(part * MOST_LAYERS + 1)} to ${whole(Math.min(layers, (part + 1) * MOST_LAYERS))} of ${whole(layers)}`;
}

function drawControls(view, options) {
  const focused = document.activeElement && document.activeElement.id;
  const nodes = [];
  for (const name of view.choices) {
    const values = options[name];
    if (values.length < 2) continue;
    if (name === "step") {
      const slider = element("input", {
        type: "range",
        id: "choose-step",
        min: 0,
        max: values.length - 1,
        step: 1,
        value: values.indexOf(state.step),
        "aria-valuetext": `step ${state.step}`,
      });
      slider.addEventListener("input", () => {
        state.step = values[+slider.value];
        render();
      });
      nodes.push(
        element(
          "label",
          { class: "field step-field" },
          element("span", {}, "Step ", element("strong", { id: "step-value" }, whole(state.step))),
          slider,
        ),
      );
      continue;
    }
    const choice = CHOICES[name];
    const select = element(
      "select",
      { id: `choose-${name}` },
      values.map((value, i) => element("option", { value: i, selected: value === state[name] }, choice.text(value))),
    );
    select.addEventListener("change", () => {
      state[name] = values[+select.value];
      render();
    });
    nodes.push(element("label", { class: "field" }, choice.title, select));
  }
  const box = element("input", { type: "checkbox", id: "fit" });
  box.checked = state.fit;
  box.addEventListener("change", () => {
    state.fit = box.checked;
    render();
  });
  nodes.push(element("span", { class: "spacer" }), element("label", { class: "check" }, box, "zoom in on the values"));
  fill(byId("controls"), nodes);
  if (focused) document.getElementById(focused)?.focus();
}

function drawLegend(names) {
  const focused = document.activeElement && document.activeElement.dataset.name;
  const others = (name) => names.filter((other) => other !== name);
  const alone = (name) => {
    others(name).forEach((other) => state.hidden.add(other));
    state.hidden.delete(name);
    render();
  };
  fill(
    byId("legend"),
    names.map((name) =>
      element(
        "button",
        {
          type: "button",
          "data-name": name,
          "aria-pressed": String(!state.hidden.has(name)),
          title: "Press to show or hide; with Shift, only this one",
          onclick: (event) => {
            if (event.shiftKey) {
              alone(name);
              return;
            }
            if (!state.hidden.delete(name)) state.hidden.add(name);
            render();
          },
        },
        swatch(STYLES[name]),
        STYLES[name].name,
      ),
    ),
    names.some((name) => state.hidden.has(name))
      ? element(
          "button",
          {
            type: "button",
            class: "text",
            id: "show-all",
            onclick: () => {
              state.hidden.clear();
              render();
            },
          },
          "Show all",
        )
      : null,
  );
  byId("legend").hidden = !names.length;
  if (focused) [...byId("legend").children].find((button) => button.dataset.name === focused)?.focus();
}

function shownInChart(row) {
  const view = VIEWS[state.view];
  return !state.hidden.has(row.approximation) && (!view.choices.length || matches(row, view.choices));
}

function render() {
  const view = VIEWS[state.view];
  const { options, items } = settle(view);
  drawTabs();
  drawControls(view, options);
  const drawn = view.draw(byId("view"), items);
  fill(byId("caption"), drawn.caption);
  const measured = (drawn.rows || []).filter((row) => isNumber(row.cosine)).map((row) => row.approximation);
  drawLegend(view.legend ? NAMES.filter((name) => (drawn.names || measured).includes(name)) : []);
  if (byId("only-chart").checked || !byId("table").firstChild) drawTable(shownInChart);
}

// Settings by name; inside of them names may be those of layers, which stay as they are.
function tree(value, name = (key) => key) {
  if (Array.isArray(value)) {
    if (value.every((item) => item === null || typeof item !== "object")) return value.map(String).join(", ") || "none";
    return element(
      "ol",
      { class: "notes" },
      value.map((item) => element("li", {}, tree(item))),
    );
  }
  if (value !== null && typeof value === "object") {
    return element(
      "dl",
      { class: "tree" },
      Object.entries(value).map(([key, item]) => [
        element("dt", {}, name(key)),
        element("dd", {}, tree(item)),
      ]),
    );
  }
  return value === null ? "–" : value === true ? "yes" : value === false ? "no" : String(value);
}

const MOST_NOTES = 100;

function drawNotes() {
  const parts = [];
  RUNS.forEach((run) => {
    const name = RUNS.length > 1 ? ` (${run.name})` : "";
    if (run.cut.length)
      parts.push(
        element("h3", {}, `What was cut${name}`),
        element(
          "ul",
          { class: "notes cut" },
          run.cut.map((line) => element("li", {}, line)),
        ),
      );
    if (run.notes.length)
      parts.push(
        element("h3", {}, `How it was measured${name}`),
        element(
          "ul",
          { class: "notes" },
          run.notes.map((line) => element("li", {}, line)),
        ),
      );
  });
  if (NOTES.size) {
    const first = NOTES.size > MOST_NOTES ? `, the first ${MOST_NOTES} of ${whole(NOTES.size)}` : "";
    parts.push(
      element("h3", {}, `Notes in the table${first}`),
      element(
        "ol",
        { class: "notes" },
        [...NOTES].slice(0, MOST_NOTES).map(([note, { rows }]) => {
          const what = unique(rows.map((row) => STYLES[row.approximation].name)).join(", ");
          return element("li", {}, `${note} (${what}; ${whole(rows.length)} row${rows.length === 1 ? "" : "s"})`);
        }),
      ),
    );
  }
  fill(byId("notes"), parts);
  byId("notes-section").hidden = !parts.length;
}

function drawSettings() {
  const words = (key) => key.replaceAll("_", " ");
  const shown = RUNS.filter((run) => Object.keys(run.settings).length);
  fill(
    byId("settings"),
    shown.map((run) =>
      shown.length > 1
        ? element("details", { open: shown.length < 4 }, element("summary", {}, run.name), tree(run.settings, words))
        : tree(run.settings, words),
    ),
  );
  byId("settings-section").hidden = !shown.length;
}

function count(many, word) {
  return `${whole(many)} ${word}${many === 1 ? "" : "s"}`;
}

function drawHead() {
  const layers = RUNS.reduce((sum, run) => sum + run.layers, 0);
  const facts = [
    RUNS.length > 1 ? count(RUNS.length, "run") : "",
    count(layers, "layer"),
    count(unique(ROWS.map((row) => row.step)).length, "step"),
    count(NAMES.length, "approximation"),
    samplesOf(ROWS),
  ];
  byId("facts").textContent = facts.filter(Boolean).join(" · ");
  const questions = unique(RUNS.map((run) => run.question));
  const asking = (question) =>
    RUNS.filter((run) => run.question === question)
      .map((run) => run.name)
      .join(", ");
  fill(
    byId("question"),
    questions.length === 1
      ? questions[0]
      : questions.map((question) =>
          element("span", {}, element("b", {}, `${asking(question)}: `), question, element("br")),
        ),
  );
  const partial = RUNS.filter((run) => run.partial);
  byId("partial").hidden = !partial.length;
  byId("partial").textContent =
    plain(`Partial: ${RUNS.length > 1 ? `${partial.map((run) => run.name).join(", ")} ` : "the run "}was interrupted; this is what was done until then.`);
}

// A picture outside the page has no variables: write their values in.
function saveSvg() {
  const pictures = [...byId("view").querySelectorAll(".chart > svg")];
  const colors = getComputedStyle(root);
  const all = shape("svg", { xmlns: "http://www.w3.org/2000/svg" });
  let top = 0,
    width = 0;
  for (const picture of pictures) {
    const [, , wide, high] = picture.getAttribute("viewBox").split(" ").map(Number);
    const copy = picture.cloneNode(true);
    Object.entries({ x: 0, y: top, width: wide, height: high }).forEach(([name, value]) =>
      copy.setAttribute(name, value),
    );
    all.append(copy);
    top += high;
    width = Math.max(width, wide);
  }
  Object.entries({ width, height: top, viewBox: `0 0 ${width} ${top}` }).forEach(([name, value]) =>
    all.setAttribute(name, value),
  );
  const source = new XMLSerializer()
    .serializeToString(all)
    .replace(/var\((--[\w-]+)\)/g, (_, name) => colors.getPropertyValue(name).trim());
  download(source, "image/svg+xml", fileName("svg"));
}

function start() {
  startTheme();
  drawHead();
  drawNotes();
  drawSettings();
  drawWhole();
  document.querySelectorAll(".needs-script").forEach((section) => {
    if (!["notes-section", "settings-section", "whole-section"].includes(section.id)) section.hidden = !ROWS.length;
  });
  if (!ROWS.length) return;
  state.view = Object.keys(VIEWS).find((name) => VIEWS[name].exists);
  byId("filter").addEventListener("input", () => drawTable(shownInChart));
  byId("only-chart").addEventListener("change", () => drawTable(shownInChart));
  byId("save-svg").addEventListener("click", saveSvg);
  byId("save-csv").addEventListener("click", () => download(csv(), "text/csv", fileName("csv")));
  render();
  let width = byId("view").clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(byId("view").clientWidth - width) < 2) return;
    width = byId("view").clientWidth;
    requestAnimationFrame(render);
  }).observe(byId("view"));
}

start();
