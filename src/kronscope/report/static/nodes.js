// What every page needs: nodes, numbers as text, and the colour scheme. Text only ever enters a page as text, never as
// markup.
const root = document.documentElement;

function systemTheme() {
  return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function setTheme(theme) {
  root.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Change to the ${theme === "dark" ? "light" : "dark"} scheme`);
}

function startTheme() {
  setTheme(systemTheme());
  let chosen = false;
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    if (!chosen) setTheme(systemTheme());
  });
  byId("theme").addEventListener("click", () => {
    chosen = true;
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
  });
  // Paper is white.
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    setTheme("light");
  });
  window.addEventListener("afterprint", () => {
    if (before) setTheme(before);
  });
}

// A long dotted name may break after its dots, rather than anywhere.
function breakable(name) {
  return name.split(/(?<=[./_])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
}

// The first of a name's labels, which are of several widths, with which all names fit into a room; else the last.
function labelsFor(names, labels, fontSize, room) {
  const own = names.map((name) => [name, ...(labels.get(name) || [])]);
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${fontSize}px system-ui, sans-serif`;
  const widest = (texts) => texts.reduce((most, text) => Math.max(most, pen.measureText(plain(text)).width), 0);
  const many = own.reduce((most, each) => Math.max(most, each.length), 0);
  for (let i = 0; ; i += 1) {
    const texts = own.map((each) => each[Math.min(i, each.length - 1)]);
    const width = widest(texts);
    if (width <= room || i >= many - 1) return { texts, width };
  }
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

// Characters that turn the direction of what follows are shown instead of obeyed: a name must not rewrite its
// surroundings.
const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

function plain(content) {
  return content.replace(TURNING, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function fill(node, ...children) {
  node.replaceChildren(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== "")
      .map((child) => (typeof child === "string" ? plain(child) : child)),
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

// Made once: asking every number for its own takes a hundred times as long.
const GROUPED = new Intl.NumberFormat("en-US");

function whole(value) {
  return isNumber(value) ? GROUPED.format(value) : "–";
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
