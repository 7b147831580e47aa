// The data of the page.
const DATA = JSON.parse(document.getElementById("data").textContent);
// A chart has room for so many layers at a time.
const MOST_LAYERS = 60;
// Names longer than this are shown without their middle; FULL has what they stand for.
const MOST_LETTERS = 200;
const FULL = new Map();
const LABELS = new Map();
const RUNS = DATA.runs.map((run, r) => ({
  ...run,
  name: labelOf(run.name),
  ...rowsOf(run, r),
  short: new Map(run.short.map(([name, ...labels]) => [labelOf(name), labels])),
}));
RUNS.forEach((run) =>
  run.details.forEach((detail) => {
    detail.layer = labelOf(detail.layer);
    detail.condition = conditionOf(detail);
  }),
);
const ROWS = RUNS.flatMap((run) => run.rows);
const STYLES = DATA.styles;
const NAMES = Object.keys(STYLES);
NAMES.forEach((name) => {
  STYLES[name].name = labelOf(STYLES[name].name);
});

function labelOf(name) {
  if (name.length <= MOST_LETTERS) return name;
  if (!LABELS.has(name)) {
    const [head, tail] = [name.slice(0, 120), name.slice(-60)];
    let label = `${head}…${tail}`;
    for (let number = 2; FULL.has(label); number++) label = `${head}…(${number})…${tail}`;
    FULL.set(label, name);
    LABELS.set(name, label);
  }
  return LABELS.get(name);
}

// Rows come in columns: a list of values, the values that there are and which of them each row has, or one value.
function rowsOf(run, number) {
  const places = new Map();
  const columns = DATA.fields.map((field) => run.columns[field]);
  const readers = columns.map((column) => {
    if (Array.isArray(column)) return (i) => column[i];
    if (column.at) return (i) => column.values[column.at[i]];
    return () => column.value;
  });
  const rows = [];
  for (let i = 0; i < run.count; i++) {
    const row = { run: number };
    for (let k = 0; k < readers.length; k++) row[DATA.fields[k]] = readers[k](i);
    row.condition = conditionOf(row);
    row.layer = labelOf(row.layer);
    if (!places.has(row.layer)) places.set(row.layer, places.size);
    row.part = Math.floor(places.get(row.layer) / MOST_LAYERS);
    rows.push(row);
  }
  return { rows, layers: places.size };
}

function grouped(items, key) {
  const found = new Map();
  for (const item of items) {
    const name = key(item);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(item);
  }
  return found;
}

function conditionOf(item) {
  const own = item.kind && item.options ? `|${item.options}` : "";
  return `${item.truth}|${item.labels}|${item.batch_size}${own}`;
}

function conditionName(condition) {
  // "B = 256" stays on one line.
  return DATA.conditions[condition].replaceAll(" = ", "\u00a0=\u00a0");
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
