// Places in words.

const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const either = (numbers) => numbers.map(number).join(" or ");
const range = (first, last) => (first === last ? number(first) : `${number(first)} to ${number(last)}`);

// Of one code: its byte, and which of the byte's bits.
function placeText(map, { byte, bit }) {
  if (map.bits > 8) return `bytes ${range(byte, byte + map.bits / 8 - 1)}`;
  if (map.bits === 8) return `byte ${number(byte)}`;
  if (map.bits === 4) return `byte ${number(byte)}, ${(bit === 0) === map.lowFirst ? "low" : "high"} nibble`;
  const end = bit + map.bits;
  const into = end > 8 ? `, into byte ${number(byte + 1)}` : "";
  return `byte ${number(byte)}, from its bit ${bit}${into}`;
}

// Of all copies of a value.
function placesText(map, places) {
  if (places.length === 1) return placeText(map, places[0]);
  const sorted = places.map(({ byte }) => byte).sort((a, b) => a - b);
  const apart = sorted[1] - sorted[0];
  const even = sorted.every((byte, i) => i === 0 || byte - sorted[i - 1] === apart);
  const copies = `${places.length} copies: bytes `;
  if (even) return `${copies}${number(sorted[0])} to ${number(sorted[sorted.length - 1])}, ${number(apart)} apart`;
  const few = sorted.slice(0, 6).map(number).join(", ");
  return `${copies}${few}${sorted.length > 6 ? ", …" : ""}`;
}

const coversText = ([m, k]) => (m === null && k === null ? "the whole weight" : `${m ?? "all"} × ${k ?? "all"}`);

// The block of an element, by the map of its scale's plane: its number, and its rows and columns.
function blockAt(recipe, row, column) {
  const [name, m, k] = blockOf(recipe);
  const buffer = recipe.buffers.find((one) => one.orientation === name && one.kind === "scale");
  const map = mapOf(planeOf(recipe, buffer.plane).formula);
  const [r, c] = map.index(row, column);
  const [top, left] = map.elementOf([r, c]);
  const [below, right] = map.elementOf([r + 1, c + 1]);
  return {
    name, r, c, top, left,
    bottom: m === null ? state.m : Math.min(below, state.m),
    right: k === null ? state.k : Math.min(right, state.k),
  };
}

const planeOf = (recipe, name) => recipe.planes.find((plane) => plane.name === name);

// The ranks that have rows of a plane's value.
function ranksOf(recipe, plane, row) {
  const map = mapOf(plane.formula);
  const [own] = map.index(row, 0);
  return cutsOf(recipe).ranks.flatMap(([first, last], rank) => (
    last > first && map.index(first, 0)[0] <= own && own <= map.index(last - 1, 0)[0] ? [rank] : []));
}

// Where a value is in what a rank sends of a plane: from the first value that the rank has rows of.
function sentAt(recipe, plane, row, column, rank) {
  const map = mapOf(plane.formula);
  const [first] = cutsOf(recipe).ranks[rank];
  const begin = map.positions(first, 0)[0].byte;
  const { byte, bit } = map.positions(row, column)[0];
  return { byte: byte - begin, bit };
}
