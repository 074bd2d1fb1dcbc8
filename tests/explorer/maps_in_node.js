// Follows formulas with the page's own maps.js: {maps: file, cases: [{formula, m, k, elements}]} on stdin, places on stdout.
const { mapAt } = require(process.argv[2]);
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(cases.map(({ formula, m, k, elements }) => {
  const map = mapAt(formula, m, k);
  const values = [];
  for (let code = 0; code < map.count; code += 1) values.push(map.valueAt(code));
  return {
    bytes: map.bytes,
    values,
    codes: elements.map(([row, column]) => map.codes(row, column)),
    positions: elements.map(([row, column]) => map.positions(row, column).map(({ byte, bit }) => [byte, bit])),
    back: elements.map(([row, column]) => map.elementOf(map.index(row, column))),
  };
})));
