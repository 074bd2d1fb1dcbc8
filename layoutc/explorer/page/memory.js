// A buffer as it lies in memory: a cell for each value, in the order of bytes, as laid out or as a GEMM reads it.

const MEMORY_CELL = { width: 38, height: 20, left: 52 };

function memoryPicture(recipe, draw) {
  const first = recipe.buffers.find((one) => one.swizzled) || recipe.buffers.find((one) => one.kind === "scale")
    || recipe.buffers[0];
  const chosen = { buffer: first, swizzled: Boolean(first.swizzled), codes: new Map() };
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

  return {
    box: node("section", { class: "lightable", "data-part": "swizzle" },
      node("h3", {}, "In memory"),
      node("p", { class: "row" }, node("label", { for: id }, "Buffer "), select, orderLabel), note, figure),
    draw() {
      const { buffer } = chosen;
      const swizzled = chosen.swizzled && Boolean(buffer.swizzled);
      orderLabel.hidden = !buffer.swizzled;
      order.checked = swizzled;
      const map = mapOf(swizzled ? buffer.swizzled : buffer.formula);
      note.replaceChildren(memoryNote(recipe, buffer, map, swizzled));
      const made = memoryCells(map, figure.clientWidth || 640);
      figure.setAttribute("aria-label", made.label);
      figure.replaceChildren(made.svg);
    },
  };
}

function memoryNote(recipe, buffer, map, swizzled) {
  const plane = planeOf(recipe, buffer.plane);
  const places = map.positions(state.row, state.column);
  const made = buffer.made_by.length ? `${buffer.made_by.join(", ")}` : "the plane, as it is stored";
  const of = buffer.kind === "data" ? "Each cell is an element" : `Each cell is the value of a ${coversText(plane.covers)} block`;
  const repeat = buffer.formula.steps.find(([name]) => name === "repeat");
  const line = repeat && repeat[3][0] === "m" ? "row" : "column";
  const why = places.length > 1
    ? ` The chosen one stands here ${places.length} times, once for each ${line} of its block: a GEMM takes the ${line}s one by one, and each needs its own ${buffer.kind}.`
    : "";
  const order = swizzled ? ` The swizzle ${recipe.swizzle} then puts what one load reads side by side.` : "";
  return `${of}; a dot is padding. From ${plane.name}: ${made}.${why}${order}`;
}

// The cells around the first place of the chosen element's value.
function memoryCells(map, width) {
  const { width: w, height: h, left } = MEMORY_CELL;
  const perLine = Math.min(width < 480 ? 8 : 16, map.count);
  const mine = new Set(map.codes(state.row, state.column));
  const shown = Math.min(map.count, perLine * 32);
  const first = Math.min(...mine);
  const begin = Math.floor(first / shown) * shown;
  const end = Math.min(map.count, begin + shown);
  const values = [];
  for (let code = begin; code < end; code += 1) values.push(map.valueAt(code));
  const rows = values.map((value) => (value ? map.elementOf(value)[0] : 0));
  const most = Math.max(1, ...rows);
  const least = Math.min(...rows);
  const lines = Math.ceil(values.length / perLine);
  const svg = node("svg:svg", {
    viewBox: `0 0 ${left + perLine * w + 2} ${lines * h + 2}`, class: "memory", "aria-hidden": "true",
    style: `max-width:${left + perLine * w + 2}px`,
  });
  const cells = node("svg:g");
  const marked = node("svg:g");
  let edges = "";
  for (let line = 0; line < lines; line += 1) {
    cells.append(text(number(map.place(begin + line * perLine).byte), left - 7, line * h + 15, "tick end"));
  }
  values.forEach((value, i) => {
    const [at, line] = [left + (i % perLine) * w, Math.floor(i / perLine) * h + 1];
    const code = begin + i;
    const isMine = mine.has(code);
    const tint = value ? 8 + (30 * (rows[i] - least)) / Math.max(1, most - least) : 0;
    const cell = node("svg:g", value ? { class: "cell", "data-code": code } : { class: "cell padding" },
      node("svg:rect", { x: at, y: line, width: w, height: h, style: value ? `--tint:${tint.toFixed(0)}%` : null }),
      text(value ? value.join(",") : "·", at + w / 2, line + 14, value ? "value" : "value none"));
    if (value) cell.addEventListener("click", () => change(within(map, value)));
    cells.append(cell);
    if (isMine) marked.append(node("svg:rect", { x: at + 1, y: line + 1, width: w - 2, height: h - 2, class: "mine" }));
    if ((code * map.bits) % 8 === 0) edges += `M${at} ${line}V${line + h}`;
  });
  svg.append(cells, node("svg:path", { d: edges, class: "byteedge" }), marked);
  const unit = map.place(begin).byte;
  const label = `Bytes ${number(unit)} to ${number(map.place(end - 1).byte)} of ${number(map.bytes)}; `
    + `${mine.size === 1 ? "the chosen value is" : `${mine.size} copies of the chosen value are`} marked.`;
  return { svg, label };
}

// The element of a value that is nearest to the chosen one, so that a click keeps what it can.
function within(map, value) {
  const [row, column] = map.elementOf(value);
  return map.index(state.row, state.column).join() === value.join() ? {} : { row, column };
}
