// The live page: asks for lines it has not seen, keeps the records that count, and draws them anew when there are more;
// map and curves are in live_charts.js.
const META = JSON.parse(byId("data").textContent);
const LAYERS = META.layers;
const POLL = 1000;
const MOST_POINTS = 400;
const SERIES = 6;
// Of more layers than this the worst are shown, until all are asked for.
const MOST_LAYERS = 40;

// Each number of a layer: how it is called, whether a large one is bad, and whether its scale is logarithmic.
const NUMBERS = {
  cosine_live: { title: "Cosine, live", bad: -1 },
  update_ratio: { title: "Update / weight", bad: 1, log: true },
  residual: { title: "Root residual", bad: 1, log: true },
  staleness: { title: "Age of roots", bad: 1 },
  condition: { title: "Condition", bad: 1, log: true },
  effective_rank: { title: "Effective rank", bad: -1, log: true },
  gradient_norm: { title: "Gradient norm", bad: 1, log: true },
  weight_norm: { title: "Weight norm", bad: 1, log: true },
  cosine_optimal: { title: "Cosine, optimal", bad: -1, beside: true },
  cosine_shampoo2: { title: "Cosine, Shampoo²", bad: -1, beside: true },
};
const CAPTIONS = {
  cosine_live: "Cosine of the Gauss–Newton matrix with the one that the optimizer's state stands for",
  update_ratio: "Size of a step relative to the weights",
  residual: "How far the stored roots are from those of the present factors; large values are normal, most of all in the first steps",
  staleness: "Steps since a layer's oldest root was taken",
  condition: "Largest over smallest eigenvalue of a factor",
  effective_rank: "Over how many directions a factor's trace is spread",
  gradient_norm: "Norm of the gradient",
  weight_norm: "Norm of the weights before the step",
};
const RUN_TITLES = {
  loss: "Loss",
  skipped_steps: "Skipped steps",
  optimizer_seconds: "Seconds in the optimizer, last step",
};

const state = { offset: 0, records: [], every: null, ended: null, age: null, number: null, layer: null, all: false, answered: true };

// ------------------------------------------------------------------ records

function take(line) {
  if (line.event === "start") {
    state.records = state.records.filter((record) => record.step <= line.step);
    state.ended = null;
    state.every = line.every;
  } else if (line.event === "end") state.ended = line;
  else if (line.layers && line.run) {
    const numbers = { ...line.layers };
    const before = state.records.findLast((record) => record.numbers.cosine_live)?.numbers;
    for (const row of line.cosines || []) {
      // layers take turns: what was last known of the others stays
      const name = `cosine_${row.approximation}`;
      numbers[name] ||= before?.[name] ? [...before[name]] : LAYERS.map(() => null);
      const place = LAYERS.findIndex((layer) => layer.name === row.layer);
      if (place >= 0) numbers[name][place] = row.cosine;
    }
    const { step, time, run, warnings = [], measuring } = line;
    state.records.push({ step, time, numbers, run, warnings, measuring });
  }
}

async function poll() {
  let again = POLL;
  try {
    const answer = await (await fetch(`records?from=${state.offset}`)).json();
    state.answered = true;
    state.age = answer.age;
    if (answer.restarted) Object.assign(state, { records: [], ended: null });
    answer.lines.forEach(take);
    state.offset = answer.offset;
    if (answer.more) again = 0;
    else if (answer.lines.length || answer.restarted) draw();
  } catch {
    state.answered = false;
  }
  drawHead();
  setTimeout(poll, again);
}

// Records that have a number, one in several where there are very many.
function having(number) {
  const found = state.records.filter((record) => (record.numbers[number] || []).some(isNumber));
  const every = Math.ceil(found.length / MOST_POINTS);
  return found.filter((_, i) => (found.length - 1 - i) % every === 0);
}

function latest(number, place) {
  for (let i = state.records.length - 1; i >= 0; i -= 1) {
    const value = (state.records[i].numbers[number] || [])[place];
    if (isNumber(value)) return value;
  }
  return null;
}

// Places of the layers, the worst by a number first; those that do not have it last.
function worstFirst(number) {
  const { bad } = NUMBERS[number];
  const values = LAYERS.map((_, place) => latest(number, place));
  const key = (place) => (values[place] === null ? -Infinity : bad * values[place]);
  return LAYERS.map((_, place) => place).sort((a, b) => key(b) - key(a) || a - b);
}

// ------------------------------------------------------------------ numbers as text and colour

function brief(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("e+", "e");
  return String(+value.toPrecision(3));
}

function scaled(number, value) {
  if (!isNumber(value)) return null;
  if (!NUMBERS[number].log) return value;
  return value > 0 ? Math.log10(value) : null;
}

function unscaled(number, value) {
  return NUMBERS[number].log ? 10 ** value : value;
}

function limitsOf(number, values) {
  const finite = values.filter(isNumber);
  if (!finite.length) return [0, 1];
  if (number.startsWith("cosine")) return [Math.min(0, ...finite), 1];
  const low = finite.reduce((a, b) => Math.min(a, b)),
    high = finite.reduce((a, b) => Math.max(a, b));
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  // what is counted begins at zero, and no axis goes below it where no value does
  const log = NUMBERS[number]?.log;
  if (number === "skipped_steps") return [0, Math.max(1, high + pad)];
  return [!log && low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

// From pale to dark as it gets worse, in five stops that keep apart for every kind of eye.
const RAMP = [
  [253, 231, 170],
  [240, 176, 110],
  [214, 106, 94],
  [140, 50, 102],
  [50, 20, 84],
];

function shade(part) {
  const at = Math.max(0, Math.min(1, part)) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const mixed = RAMP[low].map((from, i) => Math.round(from + (RAMP[low + 1][i] - from) * (at - low)));
  return `rgb(${mixed.join(",")})`;
}

// ------------------------------------------------------------------ the rest of the page

function drawTabs(numbers) {
  const open = (number) => {
    state.number = number;
    draw();
    byId(`tab-${number}`).focus();
  };
  fill(
    byId("tabs"),
    numbers.map((number, i) =>
      element(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${number}`,
          "aria-selected": String(number === state.number),
          "aria-controls": "view",
          tabindex: number === state.number ? 0 : -1,
          onclick: () => open(number),
          onkeydown: (event) => {
            const moves = { ArrowRight: 1, ArrowLeft: -1 };
            if (!(event.key in moves)) return;
            open(numbers[(i + moves[event.key] + numbers.length) % numbers.length]);
            event.preventDefault();
          },
        },
        NUMBERS[number].title,
      ),
    ),
  );
}

function drawTable(numbers, order) {
  const shown = [...numbers.filter((number) => number !== "weight_norm"), ...["cosine_optimal", "cosine_shampoo2"].filter((number) => having(number).length)];
  fill(
    byId("table"),
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        element("th", {}, "layer"),
        element("th", {}, "shape"),
        shown.map((number) => element("th", { class: "number" }, NUMBERS[number].title)),
      ),
    ),
    element(
      "tbody",
      {},
      order.map((place) =>
        element(
          "tr",
          {},
          element("td", { class: "name" }, nameButton(place, { class: "plain" })),
          element("td", {}, `${LAYERS[place].rows} × ${LAYERS[place].cols}`),
          shown.map((number) => element("td", { class: "number" }, brief(latest(number, place)))),
        ),
      ),
    ),
  );
}

function drawWarnings() {
  const last = state.records[state.records.length - 1];
  const texts = last ? last.warnings : [];
  const nothing = last ? `Nothing to warn of at step ${whole(last.step)}.` : "No record yet.";
  fill(
    byId("warnings"),
    texts.length ? texts.map((text) => element("li", {}, text)) : element("li", { class: "fine" }, nothing),
  );
}

// A choice between the worst layers and all of them, where these are many.
function drawMore() {
  byId("more").hidden = LAYERS.length <= MOST_LAYERS;
  const many = whole(LAYERS.length);
  byId("more").textContent = state.all ? `Only the ${MOST_LAYERS} worst of ${many} layers` : `The ${MOST_LAYERS} worst are shown: all ${many} layers`;
}

// When the next cosines come, and why there are none yet.
function drawDue() {
  const last = state.records[state.records.length - 1];
  const due = (last && last.measuring) || "";
  const none = !having("cosine_optimal").length;
  let text = "";
  if (due && state.ended) text = none ? `No cosines were measured: the run ended before the first were due, ${due}.` : "";
  else if (due) text = `${none ? "No cosines yet. Next" : "Next cosines"}: ${due}.`;
  byId("due").hidden = !text;
  if (byId("due").textContent !== text) byId("due").textContent = text;
}

function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

function drawHead() {
  const { records } = state;
  const last = records[records.length - 1];
  // longer than usual between two records
  const gaps = records.slice(-6).map((record, i, some) => (i ? record.time - some[i - 1].time : 0));
  const late = state.age !== null && state.age > 60 + 10 * Math.max(0, ...gaps);
  let [kind, text] = ["live", "live"];
  if (!state.answered) [kind, text] = ["lost", "the server has ended"];
  else if (state.ended) [kind, text] = ["ended", `${state.ended.how} after step ${whole(state.ended.step)}`];
  else if (!last) [kind, text] = ["waiting", "waiting for the first record"];
  else if (late) [kind, text] = ["lost", `no record for ${ago(state.age)}: has the run stopped?`];
  byId("status").dataset.kind = kind;
  if (byId("status").textContent !== text) byId("status").textContent = text;
  const facts = [META.optimizer, `${LAYERS.length} layer${LAYERS.length === 1 ? "" : "s"}`];
  if (last) {
    facts.push(`step ${whole(last.step)}`, `${whole(records.length)} record${records.length === 1 ? "" : "s"}`);
    if (state.every) facts.push(`one every ${state.every} steps`);
    const { watching_seconds: watching, training_seconds: training } = last.run;
    if (training > 0) facts.push(`watching takes ${brief((100 * watching) / training)} % of training's time`);
  }
  byId("facts").textContent = facts.join(" · ");
}

function draw() {
  const numbers = Object.keys(NUMBERS).filter((number) => !NUMBERS[number].beside && having(number).length);
  byId("chart-section").hidden = byId("table-section").hidden = !numbers.length;
  drawWarnings();
  drawDue();
  drawRun();
  if (!numbers.length) return;
  const focused = document.activeElement && document.activeElement.id;
  if (!numbers.includes(state.number)) state.number = numbers[0];
  const everyone = worstFirst(state.number);
  const order = state.all ? everyone : everyone.slice(0, MOST_LAYERS);
  drawTabs(numbers);
  byId("caption").textContent = `${CAPTIONS[state.number]}; worst layers first.`;
  drawMap(state.number, order);
  drawCurves(state.number, order);
  drawTable(numbers, order);
  drawMore();
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

startTheme();
byId("more").onclick = () => {
  state.all = !state.all;
  draw();
};
drawHead();
drawWarnings();
let width = 0;
new ResizeObserver(() => {
  const now = byId("view").clientWidth;
  if (Math.abs(now - width) < 2 || !state.records.length) return;
  width = now;
  requestAnimationFrame(draw);
}).observe(byId("chart-section"));
poll();
