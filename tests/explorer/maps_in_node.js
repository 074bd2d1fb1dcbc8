// Follows formulas with the page's own maps.js: on each line of stdin a list of {formula, m, k, elements}, on stdout their places.
const { mapAt } = require(process.argv[2]);
const answer = ({ formula, m, k, elements }) => {
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
};
const lines = require("readline").createInterface({ input: process.stdin });
lines.on("line", (line) => process.stdout.write(`${JSON.stringify(JSON.parse(line).map(answer))}\n`));
