// The data of the page, and helpers that build nodes. Text only ever enters the page as text, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs.map((run) => ({
  ...run,
  rows: run.rows.map((values) => Object.fromEntries(DATA.fields.map((field, i) => [field, values[i]]))),
}));
RUNS.forEach((run, r) =>
  run.rows.forEach((row) => {
    row.run = r;
    row.condition = conditionOf(row);
  }),
);
RUNS.forEach((run) =>
  run.details.forEach((detail) => {
    detail.condition = conditionOf(detail);
  }),
);
const ROWS = RUNS.flatMap((run) => run.rows);
const STYLES = DATA.styles;
const NAMES = Object.keys(STYLES);

function conditionOf(item) {
  const own = item.kind && item.options ? `|${item.options}` : "";
  return `${item.truth}|${item.labels}|${item.batch_size}${own}`;
}

function conditionName(condition) {
  // "B = 256" stays on one line.
  return DATA.conditions[condition].replaceAll(" = ", "\u00a0=\u00a0");
}

// A long dotted name may break after its dots, rather than anywhere.
function breakable(name) {
  return name.split(/(?<=[./_])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
}

function unique(values) {
  return [...new Set(values)];
}

function ascending(values) {
  return unique(values).sort((a, b) => a - b);
}

function byId(id) {
  return document.getElementById(id);
}

function fill(node, ...children) {
  node.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""),
  );
  return node;
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  return fill(node, ...children);
}

function element(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

function shape(tag, attributes, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function whole(value) {
  return isNumber(value) ? value.toLocaleString("en-US") : "–";
}

function decimal(value, digits = 4) {
  return isNumber(value) ? value.toFixed(digits) : "–";
}

function withError(value, error) {
  if (!isNumber(value)) return "–";
  if (!isNumber(error)) return decimal(value);
  return `${decimal(value)} ± ${error > 0 && error < 5e-5 ? "<0.0001" : decimal(error)}`;
}

function shortStep(value) {
  return Math.abs(value) >= 10000 ? `${+(value / 1000).toPrecision(4)}k` : String(+value.toPrecision(6));
}

// A name for a download that every file system takes.
function fileName(ending) {
  const stem = DATA.title
    .replace(/[^A-Za-z0-9._-]+/g, "-")
    .replace(/^[-.]+|[-.]+$/g, "")
    .slice(0, 80);
  return `${stem || "kronscope"}.${ending}`;
}

function download(content, type, name) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = element("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
