// The maps: formulas that layoutc exported, followed step by step. No layout rule is here; tests compare it with Python.
// A size is [axis, per]: one entry for every `per` rows ("m") or columns ("k"); axis null: one entry in all.

const ceilDiv = (a, b) => Math.ceil(a / b);
const sizeAt = ([axis, per], m, k) => (axis === null ? 1 : ceilDiv(axis === "m" ? m : k, per));
const entryOf = ([axis, per], row, column) => (axis === null ? 0 : Math.floor((axis === "m" ? row : column) / per));
const product = (numbers) => numbers.reduce((all, one) => all * one, 1);
const replaced = (list, at, count, ...items) => [...list.slice(0, at), ...items, ...list.slice(at + count)];

// A dim's parts, of which number `rest` takes what the sizes leave; a number's digits in parts, and back; items by counts.
const splitSizes = (size, sizes, rest) => replaced(sizes, rest, 0, size / product(sizes));
const fromDigits = (list, parts) => list.reduce((sum, digit, at) => sum * parts[at] + digit, 0);
function toDigits(value, parts) {
  const found = [];
  for (const size of [...parts].reverse()) {
    found.unshift(value % size);
    value = Math.floor(value / size);
  }
  return found;
}
function inGroups(items, counts) {
  let at = 0;
  return counts.map((count) => items.slice(at, (at += count)));
}

// Each step: the shape after it, where a value goes, and which value is at a place (null: padding).
const STEPS = {
  permute: {
    shape: (shape, order) => order.map((d) => shape[d]),
    images: (index, shape, order) => [order.map((d) => index[d])],
    origin(index, shape, order) {
      const back = [];
      order.forEach((source, result) => { back[source] = index[result]; });
      return back;
    },
  },
  repeat: {
    shape: (shape, dim, times, limit) => replaced(shape, dim, 1, Math.min(shape[dim] * times, limit)),
    images(index, shape, dim, times, limit) {
      const found = [];
      const end = Math.min((index[dim] + 1) * times, limit);
      for (let i = index[dim] * times; i < end; i += 1) found.push(replaced(index, dim, 1, i));
      return found;
    },
    origin: (index, shape, dim, times) => replaced(index, dim, 1, Math.floor(index[dim] / times)),
  },
  pad: {
    shape: (shape, multiples) => shape.map((size, d) => ceilDiv(size, multiples[d]) * multiples[d]),
    images: (index) => [index],
    origin: (index, shape) => (index.some((i, d) => i >= shape[d]) ? null : index),
  },
  split: {
    shape: (shape, dim, sizes, rest = 0) => replaced(shape, dim, 1, ...splitSizes(shape[dim], sizes, rest)),
    images: (index, shape, dim, sizes, rest = 0) => [replaced(index, dim, 1, ...toDigits(index[dim], splitSizes(shape[dim], sizes, rest)))],
    origin(index, shape, dim, sizes, rest = 0) {
      const parts = splitSizes(shape[dim], sizes, rest);
      return replaced(index, dim, parts.length, fromDigits(index.slice(dim, dim + parts.length), parts));
    },
  },
  reorder: {
    shape: (shape) => shape,
    images: (index, shape, dim, order) => [replaced(index, dim, 1, order.indexOf(index[dim]))],
    origin: (index, shape, dim, order) => replaced(index, dim, 1, order[index[dim]]),
  },
  join: {
    shape: (shape, counts) => inGroups(shape, counts).map(product),
    images(index, shape, counts) {
      const sizes = inGroups(shape, counts);
      return [inGroups(index, counts).map((parts, d) => fromDigits(parts, sizes[d]))];
    },
    origin: (index, shape, counts) => inGroups(shape, counts).flatMap((sizes, d) => toDigits(index[d], sizes)),
  },
};

// A formula -> the map of a weight of m rows and k columns.
function mapAt(formula, m, k) {
  const bits = formula.bits;
  const steps = [];
  let shape = formula.start.map((size) => sizeAt(size, m, k));
  for (const [name, ...stated] of formula.steps) {
    const args = name === "repeat" ? [stated[0], stated[1], sizeAt(stated[2], m, k)] : stated;
    steps.push({ rule: STEPS[name], before: shape, args });
    shape = STEPS[name].shape(shape, ...args);
  }
  const last = shape[shape.length - 1];
  const lead = shape.slice(0, -1);
  const start = formula.start.map((size) => sizeAt(size, m, k));

  // The number of each place where the value that serves an element is stored, counted in codes.
  function codes(row, column) {
    let found = [formula.start.map((size) => entryOf(size, row, column))];
    for (const { rule, before, args } of steps) found = found.flatMap((index) => rule.images(index, before, ...args));
    return found.map((index) => index.reduce((sum, i, d) => sum * shape[d] + i, 0));
  }

  // The index of the value at a code's place; null for padding.
  function valueAt(code) {
    let index = [code % last];
    let rest = Math.floor(code / last);
    for (const size of [...lead].reverse()) {
      index.unshift(rest % size);
      rest = Math.floor(rest / size);
    }
    for (const { rule, before, args } of [...steps].reverse()) {
      index = rule.origin(index, before, ...args);
      if (index === null) return null;
    }
    return index;
  }

  // The first row and column of the elements that a value serves.
  function elementOf(index) {
    const at = { m: 0, k: 0 };
    formula.start.forEach(([axis, per], d) => { if (axis !== null) at[axis] = index[d] * per; });
    return [at.m, at.k];
  }

  const place = (code) => ({ byte: Math.floor((code * bits) / 8), bit: (code * bits) % 8 });
  return {
    bits,
    lowFirst: formula.low_first,
    start,
    shape,
    count: product(shape),
    bytes: (product(lead) * last * bits) / 8,
    codes,
    valueAt,
    elementOf,
    place,
    index: (row, column) => formula.start.map((size) => entryOf(size, row, column)),
    positions: (row, column) => codes(row, column).map((code) => place(code)),
  };
}

if (typeof module !== "undefined") module.exports = { mapAt };
