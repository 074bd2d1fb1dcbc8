// Records: codes and scales of a run of elements, bit by bit, in one buffer.

const RECORD_CELL = { width: 48, height: 24, left: 46 };
const KINDS = { scale: "scales", zero: "zero points", super: "scales of scales", super_zero: "scales of zero points", offset: "offsets" };
const LETTERS = { data: "", scale: "s", zero: "z", super: "S", super_zero: "Z", offset: "o" };

// Which record an element lies in, its first byte, and the entries of planes that serve the element there.
function recordOf(record, row, column) {
  const [line, along] = record.axis === "k" ? [row, column] : [column, row];
  const perLine = (record.axis === "k" ? state.k : state.m) / record.size;
  const index = Math.floor(along / record.size);
  const inside = along % record.size;
  const entries = new Map(record.entries.map(([plane, count]) => [plane, Math.floor((inside * count) / record.size)]));
  return { line, index, inside, byte: (line * perLine + index) * record.nbytes, entries };
}

// The bits of one value: where they lie in the record, from the value's lowest.
function bitsOf(record, plane, entry) {
  const holds = (field) => field.plane === plane && field.start <= entry && entry < field.start + field.count;
  return record.fields.filter(holds).map((field) => ({
    at: field.at + (entry - field.start) * field.step, low: field.low, bits: field.bits,
  })).sort((a, b) => a.low - b.low);
}

// Bits from `first` on, in words: whole bytes, or bits of one or two.
function bitsText(first, { at, low, bits }, several) {
  const [byte, bit] = [first + Math.floor(at / 8), at % 8];
  const end = bit + bits - 1;
  const lies = bit === 0 && bits % 8 === 0
    ? (bits === 8 ? `byte ${number(byte)}` : `bytes ${range(byte, byte + bits / 8 - 1)}`)
    : `byte ${number(byte)}, bits ${range(bit, Math.min(end, 7))}${end > 7 ? ` and byte ${number(byte + 1)}, bits ${range(0, end - 8)}` : ""}`;
  return several ? `its bits ${range(low, low + bits - 1)}: ${lies}` : lies;
}

function recordRows(recipe) {
  return recipe.records.flatMap((record) => {
    const found = recordOf(record, state.row, state.column);
    const whole = node("tr", { class: "lightable record", "data-part": `buffer:${record.name}` },
      node("th", { scope: "row" }, record.name, node("small", {}, "uint8, read by other programs")),
      node("td", {}, `${found.line}, ${found.index}`),
      node("td", { class: "place" }, `record at bytes ${range(found.byte, found.byte + record.nbytes - 1)}`),
      node("td", {}, "–"));
    return [whole, ...record.entries.map(([plane]) => {
      const lies = bitsOf(record, plane, found.entries.get(plane));
      const kind = record.fields.find((field) => field.plane === plane).kind;
      return node("tr", { class: `lightable ${kind}`, "data-part": `plane:${plane}` },
        node("th", { scope: "row" }, `${record.name}: ${kind}`),
        node("td", {}, `entry ${found.entries.get(plane)}`),
        node("td", { class: "place" }, lies.map((one) => bitsText(found.byte, one, lies.length > 1)).join("; ")),
        node("td", {}, "–"));
    })];
  });
}

function recordPicture(recipe) {
  if (recipe.records.length === 0) return null;
  const boxes = recipe.records.map((record) => oneRecord(record));
  return {
    box: node("section", { class: "last lightable", "data-part": `buffer:${recipe.records[0].name}` }, node("h3", {}, "In a record"), boxes.map((one) => one.box)),
    draw() { for (const one of boxes) one.draw(); },
  };
}

function oneRecord(record) {
  const figure = node("div", { class: "scroll", tabindex: 0, role: "img" });
  const marked = node("svg:g");
  const kinds = record.entries.map(([plane]) => record.fields.find((field) => field.plane === plane).kind);
  const letters = kinds.filter((kind) => LETTERS[kind]).map((kind) => `${LETTERS[kind]} ${KINDS[kind]}`);
  const note = `${record.name}: ${record.made_by.join(", ")}. Each cell is a byte, its highest bit on the left. Numbers `
    + `count values of the record: elements, and ${letters.join(", ")}.`;
  const cells = recordCells(record);
  let drawn = 0;
  return {
    box: node("div", {}, node("p", { class: "note" }, note), figure),
    draw() {
      const perLine = (figure.clientWidth || 640) < 480 ? 6 : 12;
      const found = recordOf(record, state.row, state.column);
      if (drawn !== perLine) figure.replaceChildren(recordSvg(record, cells, perLine, marked));
      drawn = perLine;
      const own = cells.filter((cell) => found.entries.get(cell.plane) === cell.entry);
      marked.replaceChildren(...own.map((cell) => node("svg:rect", { ...boxOf(cell, perLine), class: "mine" })));
      figure.setAttribute("aria-label", `${record.nbytes} bytes of record ${found.line}, ${found.index}, which begins at byte `
        + `${number(found.byte)}; element ${found.inside} of ${record.size} and its scales are marked.`);
    },
  };
}

// A field's values, cut where bytes end.
function recordCells(record) {
  const found = [];
  for (const { plane, kind, start, count, low, bits, at, step } of record.fields) {
    for (let i = 0; i < count; i += 1) {
      for (let bit = at + i * step, end = bit + bits; bit < end;) {
        const next = Math.min(end, (Math.floor(bit / 8) + 1) * 8);
        found.push({ plane, kind, entry: start + i, low, bit, bits: next - bit });
        bit = next;
      }
    }
  }
  return found;
}

function boxOf({ bit, bits }, perLine) {
  const byte = Math.floor(bit / 8);
  const each = RECORD_CELL.width / 8;
  const left = RECORD_CELL.left + (byte % perLine) * RECORD_CELL.width;
  return { x: left + (8 - (bit % 8) - bits) * each + 0.5, y: Math.floor(byte / perLine) * RECORD_CELL.height + 1.5,
    width: bits * each - 1, height: RECORD_CELL.height - 1 };
}

function recordSvg(record, cells, perLine, marked) {
  const lines = Math.ceil(record.nbytes / perLine);
  const width = RECORD_CELL.left + perLine * RECORD_CELL.width + 2;
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${lines * RECORD_CELL.height + 3}`, class: "memory", "aria-hidden": "true",
    style: `max-width:${width}px` });
  for (let line = 0; line < lines; line += 1) {
    svg.append(text(number(line * perLine), RECORD_CELL.left - 7, line * RECORD_CELL.height + 17, "tick end"));
  }
  for (const cell of cells) {
    const box = boxOf(cell, perLine);
    const made = node("svg:g", { class: `field ${cell.kind}`, "data-plane": cell.plane, "data-entry": cell.entry },
      node("svg:rect", box));
    if (cell.bits > 2) made.append(text(`${LETTERS[cell.kind] ?? ""}${cell.entry}`, box.x + box.width / 2, box.y + 15, "value"));
    if (cell.kind === "data") made.addEventListener("click", () => change(inRecord(record, cell.entry)));
    svg.append(made);
  }
  svg.append(marked);
  return svg;
}

// The element of the chosen one's record that is `entry` from its first.
function inRecord(record, entry) {
  const along = record.axis === "k" ? "column" : "row";
  return { [along]: Math.floor(state[along] / record.size) * record.size + entry };
}
