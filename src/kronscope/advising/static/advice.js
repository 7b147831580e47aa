// Advice for a model: a table of what to set, and for each layer what was compared.
const DATA = JSON.parse(byId("data").textContent);

function settingText(settings) {
  return Object.entries(settings)
    .map(([name, value]) => `${name}=${typeof value === "string" ? `"${value}"` : value}`)
    .join(", ");
}

function drawTable() {
  const heads = ["layer", "shape", "recommended", "cosine", "ms", "set", "why"];
  const body = DATA.layers.map((entry) => {
    const choice = entry.options.find((one) => one.name === entry.recommended);
    return element(
      "tr",
      {},
      element("td", { class: "name" }, breakable(entry.layer)),
      element("td", {}, entry.shape.join(" × ")),
      element("td", {}, choice.title),
      element("td", { class: "number" }, decimal(choice.cosine, 2)),
      element("td", { class: "number" }, String(+choice.milliseconds.toPrecision(2))),
      element("td", {}, settingText(entry.settings)),
      element("td", { class: "reason" }, entry.reason),
    );
  });
  fill(
    byId("table"),
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", {}, head)))),
    element("tbody", {}, body),
  );
}

function track(value, optimal) {
  const bar = element("i"),
    best = element("b");
  bar.style.width = `${100 * Math.max(0, Math.min(1, value || 0))}%`;
  best.style.left = `${100 * Math.max(0, Math.min(1, optimal || 0))}%`;
  return element("span", { class: "track", "aria-hidden": "true" }, bar, isNumber(optimal) ? best : null);
}

function drawAll() {
  fill(
    byId("all"),
    DATA.layers.map((entry) =>
      element(
        "div",
        { class: "panel" },
        element("h3", {}, entry.layer),
        element(
          "div",
          { class: "options" },
          entry.options.flatMap((one) => [
            element("span", { class: one.name === entry.recommended ? "chosen" : "" }, one.title),
            track(one.cosine, entry.optimal),
            element("span", { class: "number" }, decimal(one.cosine, 2)),
            element("span", { class: "number" }, `${+one.milliseconds.toPrecision(2)} ms`),
          ]),
        ),
      ),
    ),
  );
}

startTheme();
byId("facts").textContent = `${DATA.layers.length} layers · tolerance ${DATA.tolerance}`;
byId("question").textContent = DATA.question;
drawTable();
drawAll();
