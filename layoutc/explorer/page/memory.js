// A buffer as it lies in memory: a cell for each value, in the order of bytes, as laid out or as a GEMM reads it.

const MEMORY_CELL = { width: 38, height: 20, left: 52 };

function memoryPicture(recipe, draw) {
  const first = recipe.buffers.find((one) => one.swizzled) || recipe.buffers.find((one) => one.kind === "scale")
    || recipe.buffers[0];
  const chosen = { buffer: first, swizzled: Boolean(first.swizzled) };
  const id = `buffer-${recipe.name}`;
  const select = node("select", { id, onchange: () => choose(select.value, chosen.swizzled) },
    recipe.buffers.map((one) => node("option", { value: one.name, selected: one === first }, one.name)));
  const order = node("input", { type: "checkbox", id: `order-${recipe.name}`, onchange: () => choose(select.value, order.checked) });
  const orderLabel = node("label", { for: `order-${recipe.name}`, class: "check" }, order, "swizzled, as the GEMM reads it");
  const note = node("p", { class: "note" });
  const figure = node("div", { class: "scroll", tabindex: 0, role: "img" });

  function choose(name, swizzled) {
    chosen.buffer = recipe.buffers.find((one) => one.name === name);
    chosen.swizzled = swizzled;
    draw();
  }

  let drawn = { map: null };
  return {
    box: node("section", { class: "lightable last", "data-part": "swizzle" },
      node("h3", {}, "In memory"),
      node("p", { class: "row" }, node("label", { for: id }, "Buffer "), select, orderLabel), note, figure),
    draw() {
      const { buffer } = chosen;
      const swizzled = chosen.swizzled && Boolean(buffer.swizzled);
      orderLabel.hidden = !buffer.swizzled;
      order.checked = swizzled;
      const map = mapOf(swizzled ? buffer.swizzled : buffer.formula);
      note.replaceChildren(memoryNote(recipe, buffer, map, swizzled));
      const mine = map.codes(state.row, state.column);
      const lines = memoryLines(map, mine, figure.clientWidth || 640);
      if (drawn.map !== map || drawn.begin !== lines.begin || drawn.perLine !== lines.perLine) {
        drawn = { map, ...lines, ...memoryCells(map, lines) };
        figure.replaceChildren(drawn.svg);
      }
      drawn.marked.replaceChildren(...mine.filter((code) => code >= lines.begin && code < lines.end).map((code) => marking(code - lines.begin, lines)));
      figure.setAttribute("aria-label", memoryLabel(map, lines, mine));
    },
  };
}

function memoryNote(recipe, buffer, map, swizzled) {
  const plane = planeOf(recipe, buffer.plane);
  const places = map.positions(state.row, state.column);
  const made = buffer.made_by.length ? `${buffer.made_by.join(", ")}` : "the plane, as it is stored";
  const value = { data: "element", scale: "scale", zero: "zero point" }[buffer.kind];
  let of = `Each cell is the ${value} of a block of ${coversText(plane.covers)}; a dot is padding`;
  if (buffer.kind === "data") of = "Each cell is an element; a dot is padding";
  else if (map.count === 1) of = `The one cell is the ${value} of the whole weight`;
  const repeat = buffer.formula.steps.find(([name]) => name === "repeat");
  const line = repeat && repeat[3][0] === "m" ? "row" : "column";
  const why = places.length > 1
    ? ` The chosen one stands here ${places.length} times, once for each ${line} of its block: a GEMM takes the ${line}s one by one, and each needs its ${value} beside it.`
    : "";
  const order = swizzled ? ` The swizzle ${recipe.swizzle} then puts what one load reads side by side.` : "";
  return `${of}. From ${plane.name}: ${made}.${why}${order}`;
}

// Which codes are shown: those around the first place of the chosen element's value.
function memoryLines(map, mine, width) {
  const perLine = Math.min(width < 480 ? 8 : 16, map.count);
  const shown = Math.min(map.count, perLine * 32);
  const begin = Math.floor(Math.min(...mine) / shown) * shown;
  return { perLine, begin, end: Math.min(map.count, begin + shown) };
}

const cellAt = (i, { perLine }) => [MEMORY_CELL.left + (i % perLine) * MEMORY_CELL.width, Math.floor(i / perLine) * MEMORY_CELL.height + 1];

function marking(i, lines) {
  const [left, top] = cellAt(i, lines);
  return node("svg:rect", { x: left + 1, y: top + 1, width: MEMORY_CELL.width - 2, height: MEMORY_CELL.height - 2, class: "mine" });
}

function memoryLabel(map, { begin, end }, mine) {
  const [first, last] = [map.place(begin).byte, map.place(end - 1).byte];
  const copies = mine.length === 1 ? "the chosen value is" : `${mine.length} copies of the chosen value are`;
  return `Bytes ${number(first)} to ${number(last)} of ${number(map.bytes)}; ${copies} marked.`;
}

// The cells, darker from the first to the last row of the weight that they serve; and a group for marks.
function memoryCells(map, lines) {
  const { width: w, height: h, left } = MEMORY_CELL;
  const { perLine, begin, end } = lines;
  const values = [];
  for (let code = begin; code < end; code += 1) values.push(map.valueAt(code));
  const rows = values.map((value) => (value ? map.elementOf(value)[0] : 0));
  const [least, most] = [Math.min(...rows), Math.max(...rows)];
  const count = Math.ceil(values.length / perLine);
  const width = left + perLine * w + 2;
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${count * h + 2}`, class: "memory", "aria-hidden": "true", style: `max-width:${width}px` });
  const marked = node("svg:g");
  let edges = "";
  for (let line = 0; line < count; line += 1) {
    svg.append(text(number(map.place(begin + line * perLine).byte), left - 7, line * h + 15, "tick end"));
  }
  values.forEach((value, i) => {
    const [x0, y0] = cellAt(i, lines);
    const tint = 8 + (30 * (rows[i] - least)) / Math.max(1, most - least);
    const cell = node("svg:g", value ? { class: "cell", "data-code": begin + i } : { class: "cell padding" },
      node("svg:rect", { x: x0, y: y0, width: w, height: h, style: value ? `--tint:${tint.toFixed(0)}%` : null }),
      text(value ? value.join(",") : "·", x0 + w / 2, y0 + 13, value ? "value" : "value none"));
    if (value) cell.addEventListener("click", () => change(within(map, value)));
    svg.append(cell);
    if (((begin + i) * map.bits) % 8 === 0) edges += `M${x0} ${y0}V${y0 + h}`;
  });
  svg.append(node("svg:path", { d: edges, class: "byteedge" }), marked);
  return { svg, marked };
}

// The element of a value that is nearest to the chosen one, so that a click keeps what it can.
function within(map, value) {
  const [row, column] = map.elementOf(value);
  return map.index(state.row, state.column).join() === value.join() ? {} : { row, column };
}
