// The values of an element format's codes, on a line; a slider goes through the codes.

const VALUES_LINE = { width: 640, height: 46, edge: 26 };

function valuesBox(recipe) {
  const boxes = recipe.codes.map((codes) => oneFormat(recipe, codes));
  return node("section", { class: "last" }, node("h3", {}, "The values of codes"), boxes);
}

function oneFormat(recipe, codes) {
  const id = `code-${recipe.name}-${codes.name}`;
  const finite = codes.values.filter((value) => value !== null);
  const [least, most] = [Math.min(...finite), Math.max(...finite)];
  const { width, height, edge } = VALUES_LINE;
  const at = (value) => edge + ((value - least) / (most - least)) * (width - 2 * edge);
  const marked = node("svg:g");
  const ticks = finite.map((value) => `M${at(value).toFixed(2)} 10V24`).join("");
  const ends = [...new Set([least, 0, most])].map((value) => text(String(value), at(value), 40, "tick"));
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${height}`, class: "values", "aria-hidden": "true" },
    node("svg:path", { d: `M${edge} 17H${width - edge}`, class: "grid" }), node("svg:path", { d: ticks, class: "ticks" }), ends, marked);
  const input = node("input", { type: "range", id, min: 0, max: codes.values.length - 1, step: 1, value: 0, oninput: () => draw() });
  const output = node("output", { for: id });
  function draw() {
    const code = Number(input.value);
    const value = codes.values[code];
    const bits = code.toString(2).padStart(codes.bits, "0");
    output.textContent = `${bits} is ${value === null ? "no finite number" : value}`;
    input.setAttribute("aria-valuetext", `code ${code}, ${output.textContent}`);
    marked.replaceChildren(...(value === null ? [] : [node("svg:circle", { cx: at(value), cy: 17, r: 5, class: "pointer" })]));
  }
  draw();
  const count = `${codes.name}: ${codes.bits} bits, ${number(codes.values.length)} codes, ${number(new Set(finite).size)} values`;
  const how = codes.is_codebook ? ", a codebook: a value is stored as the code of the nearest" : "";
  return node("div", { class: "codes" }, node("p", { class: "note" }, `${count}${how}.`), svg,
    node("p", { class: "slider code-slider" }, node("label", { for: id }, "Code"), input, output));
}
