// What is shown: sizes, the chosen element, the first row and column of the picture. Kept in the address, so that a
// link leads to one exact picture.

const page = JSON.parse(document.getElementById("data").textContent);
const state = { m: 0, k: 0, world: 0, row: 20, column: 5, top: 0, left: 0, zoom: 1, blocks: "rowwise" };
const view = { rows: 32, columns: 32, cell: 15 }; // elements that a picture shows, and their size in it
const listeners = [];
const number = (value) => value.toLocaleString("en");

const at = {
  get m() { return page.stops.rows.indexOf(state.m); },
  get k() { return page.stops.columns.indexOf(state.k); },
  get world() { return page.stops.worlds.indexOf(state.world); },
};
const cutsOf = (recipe) => recipe.cuts[at.m][at.world];
const figuresOf = (recipe) => recipe.stops[at.m][at.k];
const blockOf = (recipe) => recipe.blocks.find(([name]) => name === state.blocks) || recipe.blocks[0];
const rankOf = (recipe, row) => cutsOf(recipe).ranks.findIndex(([first, last]) => first <= row && row < last);

const mapsMade = new Map(); // a formula's map for the present shape
function mapOf(formula) {
  if (!mapsMade.has(formula)) mapsMade.set(formula, mapAt(formula, state.m, state.k));
  return mapsMade.get(formula);
}

const clamp = (value, least, most) => Math.max(least, Math.min(value, most));

function change(changes) {
  const was = { ...state };
  Object.assign(state, changes);
  fit();
  if (state.m !== was.m || state.k !== was.k) mapsMade.clear();
  state.row = clamp(state.row, 0, state.m - 1);
  state.column = clamp(state.column, 0, state.k - 1);
  if ("row" in changes || "column" in changes || "zoom" in changes) { // the picture follows the element
    state.top = clamp(state.top, state.row - view.rows + 1, state.row);
    state.left = clamp(state.left, state.column - view.columns + 1, state.column);
  }
  state.top = clamp(state.top, 0, Math.max(0, state.m - view.rows));
  state.left = clamp(state.left, 0, Math.max(0, state.k - view.columns));
  for (const listener of listeners) listener(state);
  remember();
}

// How many elements the pictures show: fewer on a phone.
const ZOOMS = [1, 2, 4];
function fit() {
  const phone = window.innerWidth < 560;
  const wide = window.innerWidth >= (page.recipes.length === 1 ? 1100 : 1500);
  const [rows, columns] = [phone ? 26 : 32, phone ? 20 : wide ? 40 : 32];
  Object.assign(view, { rows: rows * state.zoom, columns: columns * state.zoom, cell: 15 / state.zoom });
}

let remembering = 0;
function remember() { // not for each element that a pointer passes
  clearTimeout(remembering);
  remembering = setTimeout(() => {
    const words = Object.entries(state).map(([key, value]) => `${key}=${value}`).join("&");
    try { history.replaceState(null, "", `#${words}`); } catch { /* pages of some viewers have no address */ }
  }, 250);
}

function recalled() {
  const [m, k, world] = page.stops.first;
  const found = { m, k, world };
  const words = new URLSearchParams(location.hash.slice(1));
  const stops = { m: page.stops.rows, k: page.stops.columns, world: page.stops.worlds, zoom: ZOOMS };
  for (const [key, value] of words) {
    if (key === "blocks" && (value === "rowwise" || value === "columnwise")) found.blocks = value;
    else if (key in state && /^\d{1,10}$/.test(value) && (!(key in stops) || stops[key].includes(Number(value)))) {
      found[key] = Number(value);
    }
  }
  return found;
}

// A node of HTML, or of SVG if its name begins with "svg:". Attributes that begin with "on" are listeners.
function node(name, attributes = {}, ...children) {
  const isSvg = name.startsWith("svg:");
  const made = isSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}
