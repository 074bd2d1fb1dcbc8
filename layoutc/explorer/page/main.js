// The page: controls that all recipes share, and an article for each recipe.

function slider(id, label, stops, key, words) {
  const input = node("input", { type: "range", id, min: 0, max: stops.length - 1, step: 1,
    oninput: () => change({ [key]: stops[Number(input.value)] }) });
  const output = node("output", { for: id });
  const box = node("p", { class: "slider" }, node("label", { for: id }, label), input, output);
  return { box, draw() {
    input.value = stops.indexOf(state[key]);
    output.textContent = words(state[key]);
    input.setAttribute("aria-valuetext", words(state[key]));
  } };
}

// The first row or column that the pictures show.
function position(id, label, key, size, shown) {
  const input = node("input", { type: "range", id, min: 0, step: 8, oninput: () => change({ [key]: Number(input.value) }) });
  const output = node("output", { for: id });
  const box = node("p", { class: "slider" }, node("label", { for: id }, label), input, output);
  return { box, draw() {
    const most = Math.max(0, state[size] - view[shown]);
    input.max = Math.ceil(most / 8) * 8;
    input.disabled = most === 0;
    input.value = state[key];
    const last = Math.min(state[size], state[key] + view[shown]) - 1;
    output.textContent = `${number(state[key])}–${number(last)}`;
    input.setAttribute("aria-valuetext", range(state[key], last));
  } };
}

function orientations() {
  const names = ["rowwise", "columnwise"].filter((name) => page.recipes.some((recipe) => recipe.blocks.some(([one]) => one === name)));
  const inputs = names.map((name) => node("input", { type: "radio", name: "blocks", id: `blocks-${name}`, value: name,
    onchange: () => change({ blocks: name }) }));
  const box = node("fieldset", {}, node("legend", {}, "Blocks"),
    names.map((name, i) => node("label", { for: `blocks-${name}` }, inputs[i], name)));
  return { box, draw() {
    for (const input of inputs) input.checked = input.value === state.blocks;
  } };
}

function legend(recipe) {
  const pairs = [["block", "its block"], ["byte", "same byte"], ["rank", "ranks, and a cut between blocks"]];
  if (recipe.block_rows > 1) pairs.push(["cut", "a cut inside of a block"], ["halo", "halo: rows of its block on other ranks"]);
  return node("p", { class: "legend" }, pairs.map(([kind, words]) => node("span", {}, node("i", { class: `swatch ${kind}` }), words)));
}

function article(recipe) {
  const parts = {};
  const draw = () => parts.memory.draw();
  parts.weight = weightPicture(recipe);
  parts.readout = readout(recipe);
  parts.memory = memoryPicture(recipe, draw);
  parts.record = recordPicture(recipe);
  parts.cuts = cutsBox(recipe);
  parts.budget = budgetBox(recipe);
  parts.spec = specBox(recipe);
  const blocks = recipe.blocks.map(([name, m, k]) => `${m ?? "all"} × ${k ?? "all"} ${name}`).join(", ");
  const made = node("article", { "aria-labelledby": `name-${recipe.name}`, id: `recipe-${recipe.name}` },
    node("header", {}, node("h2", { id: `name-${recipe.name}` }, recipe.name), node("p", {}, recipe.summary),
      node("p", { class: "note" }, `Blocks: ${blocks}. Layout id ${recipe.layout_id}.`),
      recipe.origins.map(([orientation, reason]) => node("p", { class: "note" }, `${orientation}: ${reason}.`))),
    node("div", { class: "sized" }, node("div", { class: "columns" },
      node("div", { class: "group" },
        node("section", { class: "lightable first", "data-part": "shape" }, node("h3", {}, "The weight"), parts.weight.frame, legend(recipe)),
        parts.cuts.box),
      parts.readout.box,
      parts.memory.box,
      parts.record ? parts.record.box : null,
      valuesBox(recipe),
      node("div", { class: "last" }, parts.budget.box, parts.spec.box))));
  made.addEventListener("pointerover", (event) => {
    const row = event.target.closest ? event.target.closest("[data-part]") : null;
    parts.spec.reverse(row ? [row.dataset.part] : []);
  });
  return { made, draw() {
    for (const one of ["weight", "readout", "memory", "record", "cuts", "budget"]) if (parts[one]) parts[one].draw();
    light(made, lit.parts);
  } };
}

function build() {
  const controls = [
    slider("rows", "Rows", page.stops.rows, "m", number),
    slider("columns", "Columns", page.stops.columns, "k", number),
    slider("ranks", "Ranks", page.stops.worlds, "world", number),
    position("top", "From row", "top", "m", "rows"),
    position("left", "From column", "left", "k", "columns"),
    slider("zoom", "Picture", ZOOMS, "zoom", () => `${view.rows} × ${view.columns}`),
    orientations(),
  ];
  const articles = page.recipes.map(article);
  const recipes = document.getElementById("recipes");
  document.getElementById("controls").replaceChildren(...controls.map((one) => one.box));
  recipes.replaceChildren(...articles.map((one) => one.made));
  recipes.classList.toggle("several", articles.length > 1);
  listeners.length = 0;
  listeners.push(() => {
    for (const one of [...controls, ...articles]) one.draw();
    speak();
  });
}

let speaking = 0;
function speak() { // once a movement has ended
  clearTimeout(speaking);
  speaking = setTimeout(() => { document.getElementById("live").textContent = spoken(); }, 150);
}

build();
change(recalled());
window.addEventListener("hashchange", () => change(recalled()));
window.addEventListener("resize", () => change({}));
