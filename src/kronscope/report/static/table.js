// The table of all rows: sorted by any column, filtered by words.
const MOST_ROWS = 200;
// A button adds so many: a browser needs seconds for more.
const MORE_ROWS = 2000;
const table = { sort: null, descending: false, rows: MOST_ROWS };

const COLUMNS = [
  { key: "run", title: "run", text: (row) => RUNS[row.run].name, name: true, hidden: RUNS.length < 2 },
  { key: "layer", title: "layer", text: (row) => row.layer, name: true },
  {
    key: "shape",
    title: "shape",
    number: true,
    value: (row) => row.rows * row.cols,
    text: (row) => `${row.rows} × ${row.cols}`,
  },
  { key: "step", title: "step", number: true, value: (row) => row.step, text: (row) => whole(row.step) },
  { key: "truth", title: "matrix", text: (row) => DATA.truths[row.truth] || row.truth },
  { key: "labels", title: "labels", text: (row) => row.labels },
  { key: "batch_size", title: "B", number: true, value: (row) => row.batch_size, text: (row) => whole(row.batch_size) },
  { key: "approximation", title: "approximation", text: (row) => STYLES[row.approximation].name },
  { key: "cosine", title: "cosine", number: true, value: (row) => row.cosine, text: (row) => decimal(row.cosine, 6) },
  {
    key: "stderr",
    title: "± stderr",
    number: true,
    value: (row) => row.stderr,
    text: (row) => decimal(row.stderr, 6),
    hidden: !ROWS.some((row) => isNumber(row.stderr)),
  },
  {
    key: "relative_error",
    title: "rel. error",
    number: true,
    value: (row) => row.relative_error,
    text: (row) => decimal(row.relative_error),
  },
  { key: "samples", title: "samples", number: true, value: (row) => row.samples, text: (row) => whole(row.samples) },
  {
    key: "seconds",
    title: "seconds",
    number: true,
    value: (row) => row.seconds,
    text: (row) => decimal(row.seconds, 2),
  },
  ...[
    ["trace", "tr H"],
    ["norm", "‖H‖"],
    ["effective_rank", "eff. rank"],
    ["leading_eigenvalue", "λ₁"],
  ].map(([key, title]) => ({
    key,
    title,
    number: true,
    value: (row) => row[key],
    text: (row) => (isNumber(row[key]) ? row[key].toPrecision(4) : "–"),
    hidden: !ROWS.some((row) => isNumber(row[key])),
  })),
].filter((column) => !column.hidden);

// A column that says the same everywhere takes room from the others: it is said once, above the table.
const CONSTANT =
  ROWS.length > 1
    ? COLUMNS.filter(
        (column) => !["cosine", "stderr", "relative_error", "seconds"].includes(column.key) && isConstant(column),
      )
    : [];
const SHOWN = COLUMNS.filter((column) => !CONSTANT.includes(column));

function isConstant(column) {
  const counts = column.key === "samples" ? (row) => isNumber(row.cosine) : () => true;
  const value = (column.key !== "shape" && column.value) || column.text;
  const first = ROWS.find(counts);
  return !first || ROWS.every((row) => !counts(row) || value(row) === value(first));
}

// Each note with its number in the table and the rows that have it.
const NOTES = new Map();
for (const row of ROWS) {
  if (!row.note) continue;
  if (!NOTES.has(row.note)) NOTES.set(row.note, { number: NOTES.size + 1, rows: [] });
  NOTES.get(row.note).rows.push(row);
}
const NAMES_IN_ORDER = new Intl.Collator("en", { numeric: true });

function compare(column) {
  if (!column.value) return (a, b) => NAMES_IN_ORDER.compare(column.text(a), column.text(b));
  // What does not exist stays at the end, whichever way the rest is sorted.
  return (a, b) => {
    const [first, second] = [column.value(a), column.value(b)];
    if (!isNumber(first) || !isNumber(second))
      return (isNumber(second) - isNumber(first)) * (table.descending ? -1 : 1);
    return first - second;
  };
}

function chosenRows(shownInChart) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = (byId("only-chart").checked ? ROWS.filter(shownInChart) : ROWS).filter((row) => {
    if (!words.length) return true;
    row.words ??= [...COLUMNS.map((column) => column.text(row)), row.approximation, row.truth, row.note]
      .join(" ")
      .toLowerCase();
    return words.every((word) => row.words.includes(word));
  });
  const column = COLUMNS.find(({ key }) => key === table.sort);
  if (!column) return rows;
  const order = compare(column);
  return [...rows].sort((a, b) => (table.descending ? -order(a, b) : order(a, b)));
}

function drawTable(shownInChart) {
  const rows = chosenRows(shownInChart);
  const few = rows.slice(0, table.rows);
  const focused = document.activeElement && document.activeElement.dataset.key;
  const head = element(
    "tr",
    {},
    SHOWN.map((column) =>
      element(
        "th",
        {
          scope: "col",
          class: column.number ? "number" : null,
          "aria-sort": table.sort === column.key ? (table.descending ? "descending" : "ascending") : null,
        },
        element(
          "button",
          {
            type: "button",
            "data-key": column.key,
            onclick: () => {
              // Numbers are wanted largest first, names from A to Z; a second press turns it round.
              table.descending = table.sort === column.key ? !table.descending : Boolean(column.number);
              table.sort = column.key;
              drawTable(shownInChart);
            },
          },
          column.title,
        ),
      ),
    ),
  );
  const body = few.map((row) =>
    element(
      "tr",
      {},
      SHOWN.map((column) => cell(row, column)),
    ),
  );
  fill(byId("table"), element("thead", {}, head), element("tbody", {}, body));
  if (focused) byId("table").querySelector(`button[data-key="${focused}"]`)?.focus();
  byId("constant").textContent = CONSTANT.length
    ? plain(`In every row: ${CONSTANT.map((column) => `${column.title} ${column.text(rows[0] || ROWS[0])}`).join(" · ")}.`)
    : "";
  byId("count").textContent =
    rows.length === ROWS.length ? `${whole(rows.length)} rows` : `${whole(rows.length)} of ${whole(ROWS.length)} rows`;
  byId("more").hidden = few.length === rows.length;
  const rest = rows.length - few.length;
  byId("more").textContent =
    rest <= MORE_ROWS ? `Show all ${whole(rows.length)} rows` : `Show ${whole(MORE_ROWS)} more of ${whole(rest)} rows`;
  byId("more").onclick = () => {
    table.rows = few.length + MORE_ROWS;
    drawTable(shownInChart);
  };
}

function cell(row, column) {
  const content = column.name ? breakable(column.text(row)) : [column.text(row)];
  if (column.key === "cosine") {
    const bar = element("i", {});
    bar.style.width = `${Math.max(0, Math.min(1, row.cosine || 0)) * 100}%`;
    bar.style.background = STYLES[row.approximation].color;
    content.unshift(element("span", { class: "gauge", "aria-hidden": "true" }, bar));
    if (row.note)
      content.push(element("sup", { class: "note-mark", title: row.note }, `(${NOTES.get(row.note).number})`));
  }
  return element("td", { class: column.number ? "number" : column.name ? "name" : null }, content);
}

function csv() {
  const fields = ["run", ...DATA.fields].filter((field) => field !== "run" || RUNS.length > 1);
  const quote = (value) => (/[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const named = (name) => FULL.get(name) ?? name;
  const value = (row, field) => {
    if (field === "run") return named(RUNS[row.run].name);
    return field === "layer" ? named(row.layer) : (row[field] ?? "");
  };
  return (
    [fields.join(","), ...ROWS.map((row) => fields.map((field) => quote(String(value(row, field)))).join(","))].join(
      "\n",
    ) + "\n"
  );
}
