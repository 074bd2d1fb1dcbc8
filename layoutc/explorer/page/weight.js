// The weight as a grid of elements: blocks, ranks and where they are cut, and the chosen element.

const LEFT = 64;
const TOP = 22;

function weightPicture(recipe) {
  const picture = node("svg:svg", { class: "weight", "aria-hidden": "true" });
  const fixed = node("svg:g");
  const moving = node("svg:g");
  picture.append(
    node("svg:defs", {}, node(
      "svg:pattern", { id: `halo-${recipe.name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      node("svg:line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch" }),
    )), fixed, moving);
  const frame = node("div", {
    class: "frame",
    tabindex: 0,
    role: "application",
    "aria-label": `Elements of a weight in ${recipe.name}. Arrow keys move; with Shift, by a block; Home and End, to the ends of a row.`,
    "aria-describedby": `where-${recipe.name}`,
    onkeydown: (event) => onKey(recipe, event),
  }, picture);
  const choose = (event) => {
    const found = elementUnder(picture, event);
    if (found && (found.row !== state.row || found.column !== state.column)) change(found);
  };
  picture.addEventListener("pointermove", choose);
  picture.addEventListener("pointerdown", choose);
  let drawn = "";
  return {
    frame,
    draw() {
      const now = [state.m, state.k, state.world, state.top, state.left, state.blocks, view.rows, view.columns].join();
      if (now !== drawn) {
        picture.setAttribute("viewBox", `0 0 ${LEFT + view.columns * view.cell + 2} ${TOP + view.rows * view.cell + 2}`);
        fixed.replaceChildren(...fixedParts(recipe));
      }
      drawn = now;
      moving.replaceChildren(...movingParts(recipe));
    },
  };
}

function elementUnder(picture, event) {
  const box = picture.getBoundingClientRect();
  const scale = picture.viewBox.baseVal.width / box.width;
  const column = Math.floor(((event.clientX - box.left) * scale - LEFT) / view.cell);
  const row = Math.floor(((event.clientY - box.top) * scale - TOP) / view.cell);
  const inside = column >= 0 && row >= 0 && column < view.columns && row < view.rows;
  const found = { row: state.top + row, column: state.left + column };
  return inside && found.row < state.m && found.column < state.k ? found : null;
}

function onKey(recipe, event) {
  const [, rows, columns] = blockOf(recipe);
  const down = event.shiftKey ? rows ?? view.rows : 1;
  const across = event.shiftKey ? columns ?? view.columns : 1;
  const moves = {
    ArrowUp: { row: state.row - down },
    ArrowDown: { row: state.row + down },
    ArrowLeft: { column: state.column - across },
    ArrowRight: { column: state.column + across },
    PageUp: { row: state.row - view.rows },
    PageDown: { row: state.row + view.rows },
    Home: { column: 0 },
    End: { column: state.k - 1 },
  };
  if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  change(moves[event.key]);
}

const bottom = () => Math.min(state.m, state.top + view.rows);
const right = () => Math.min(state.k, state.left + view.columns);
const x = (column) => LEFT + (clamp(column, state.left, right()) - state.left) * view.cell;
const y = (row) => TOP + (clamp(row, state.top, bottom()) - state.top) * view.cell;
const box = (top, left, below, after, attributes) => node(
  "svg:rect", { x: x(left), y: y(top), width: x(after) - x(left), height: y(below) - y(top), ...attributes });

function fixedParts(recipe) {
  const parts = [];
  const cuts = cutsOf(recipe);
  cuts.ranks.forEach(([first, last], rank) => {
    if (last <= state.top || first >= bottom()) return;
    parts.push(box(first, state.left, last, right(), { class: rank % 2 ? "rank odd" : "rank even" }));
    const [begin, end] = [y(first), y(last)];
    parts.push(node("svg:rect", { x: 34, y: begin + 1, width: 6, height: Math.max(0, end - begin - 2), class: "rankbar" }));
    if (end - begin > 40) parts.push(text(`rank ${rank}`, 27, (begin + end) / 2, "ranktext", { transform: `rotate(-90 27 ${(begin + end) / 2})` }));
    else if (end - begin >= 12) parts.push(text(`${rank}`, 27, (begin + end) / 2 + 4, "ranktext"));
  });
  let lines = "";
  const every = view.cell < 6 ? 8 : 1; // lines closer than that are grey
  for (let row = ceilDiv(state.top, every) * every; row <= bottom(); row += every) lines += `M${x(state.left)} ${y(row)}H${x(right())}`;
  for (let column = ceilDiv(state.left, every) * every; column <= right(); column += every) lines += `M${x(column)} ${y(state.top)}V${y(bottom())}`;
  parts.push(node("svg:path", { d: lines, class: "grid" }));
  let blocks = "";
  for (let row = state.top; row < bottom();) {
    const block = blockAt(recipe, row, state.left);
    blocks += `M${x(state.left)} ${y(block.top)}H${x(right())}`;
    row = block.bottom;
  }
  for (let column = state.left; column < right();) {
    const block = blockAt(recipe, state.top, column);
    blocks += `M${x(block.left)} ${y(state.top)}V${y(bottom())}`;
    column = block.right;
  }
  parts.push(node("svg:path", { d: `${blocks}M${x(right())} ${y(state.top)}V${y(bottom())}H${x(state.left)}`, class: "blocks" }));
  for (const row of marks(state.top, bottom())) parts.push(text(row, LEFT - 5, y(row) + view.cell / 2 + 4, "tick end"));
  for (const column of marks(state.left, right())) parts.push(text(column, x(column) + view.cell / 2, TOP - 7, "tick"));
  for (const [first, last, , after] of cuts.ranks) {
    if (last > state.top && last < bottom() && last > first && last < state.m) {
      parts.push(node("svg:path", { d: `M34 ${y(last)}H${x(right())}`, class: after ? "cut inside" : "cut" }));
    }
  }
  return parts;
}

// Every eighth number, or as many as there is room for; if there is none, the first.
function marks(first, last) {
  const found = [];
  const step = 8 * state.zoom;
  for (let i = Math.ceil(first / step) * step; i < last; i += step) found.push(i);
  return found.length ? found : [first];
}

const text = (words, at, line, kind, more = {}) => node("svg:text", { x: at, y: line, class: kind, ...more }, String(words));

function movingParts(recipe) {
  const { row, column } = state;
  if (row < state.top || row >= bottom() || column < state.left || column >= right()) return [];
  const parts = [];
  const block = blockAt(recipe, row, column);
  const [first, last, before, after] = cutsOf(recipe).ranks[rankOf(recipe, row)];
  const hatch = { fill: `url(#halo-${recipe.name})`, class: "halo" };
  if (before && first - before === block.top) parts.push(box(first - before, block.left, first, block.right, hatch));
  if (after && last + after === block.bottom) parts.push(box(last, block.left, last + after, block.right, hatch));
  parts.push(box(block.top, block.left, block.bottom, block.right, { class: "block lightable", "data-part": `block:${block.name}` }));
  for (const [r, c] of sharingByte(recipe, row, column)) parts.push(box(r, c, r + 1, c + 1, { class: "byte" }));
  parts.push(box(row, column, row + 1, column + 1, { class: "element" }));
  return parts;
}

// The elements whose codes have bits in the first byte of this element's code, by the plane of its codes.
function sharingByte(recipe, row, column) {
  const map = mapOf(recipe.planes.find((plane) => plane.kind === "data").formula);
  const [code] = map.codes(row, column);
  const byte = map.place(code).byte;
  const found = [];
  for (let other = code - 7; other <= code + 7; other += 1) {
    if (other < 0 || other >= map.count) continue;
    const place = map.place(other);
    const lastByte = Math.floor((place.byte * 8 + place.bit + map.bits - 1) / 8);
    if (place.byte <= byte && byte <= lastByte) found.push(map.elementOf(map.valueAt(other)));
  }
  return found;
}
