// Making elements from data. Data only ever becomes text: captions are written by strangers.

export const find = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children); // strings become text nodes
  return element;
}

const shown = new Map();

/** Draws into an element only when what it shows has changed: a live region must not repeat itself. */
export function show(id, value, draw) {
  const key = JSON.stringify(value);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  find(id).replaceChildren(...draw(value));
}

/** A sentence whose `commands` stand in backticks. */
export const sentence = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));

export const showText = (id, text) => show(id, text, () => [text]);

export function table(caption, headings, rows) {
  const cells = (tag, row) => row.map((cell) => make(tag, tag === "th" ? { scope: "col" } : {}, String(cell)));
  return make("table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...cells("th", headings))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row)))));
}

const probe = make("span", { hidden: "" });

/** A colour of the style sheet as the theme has it now, for a canvas. */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
