// The data of the page.
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
