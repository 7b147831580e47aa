// What the layers are to the matrix of all of them together.
function plainTable(head, lines) {
  const cell = (tag, text, i) =>
    element(tag, { class: i ? "number" : null, scope: tag === "th" ? "col" : null }, text);
  return element(
    "div",
    { class: "scroll" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, head.map((text, i) => cell("th", text, i)))),
      element("tbody", {}, lines.map((line) => element("tr", {}, line.map((text, i) => cell("td", text, i))))),
    ),
  );
}

function drawWhole() {
  const shown = RUNS.flatMap((run) => run.whole.map((item) => ({ ...item, name: run.name })));
  fill(
    byId("whole"),
    shown.map((item) => [
      element("h3", {}, [RUNS.length > 1 ? item.name : "", item.facts].filter(Boolean).join(" · ")),
      element(
        "div",
        { class: "pair" },
        plainTable(["layer", "share of ‖H‖²"], item.shares),
        plainTable(["approximation", "cosine with the whole", "with its block diagonal"], item.cosines),
      ),
    ]),
  );
  byId("whole-section").hidden = !shown.length;
}
