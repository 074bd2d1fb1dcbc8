// What the chosen element is: its block, its rank, and its place in each plane, buffer and pass.

function readout(recipe) {
  const where = node("p", { class: "where", id: `where-${recipe.name}` });
  const block = node("p", { class: "note" });
  const body = node("tbody");
  const travels = node("tbody");
  const table = node("table", {},
    node("caption", {}, "Where it lies"),
    node("thead", {}, node("tr", {}, ["Tensor", "Value", "Place", "Swizzled, as the GEMM reads it"].map((head) => node("th", { scope: "col" }, head)))),
    body);
  const passes = node("table", {},
    node("caption", {}, "How it travels"),
    node("thead", {}, node("tr", {}, ["Pass", "Plane", "Sent by", "Place in what is sent"].map((head) => node("th", { scope: "col" }, head)))),
    travels);
  return {
    box: node("section", { class: "second" }, node("h3", {}, "This element"), where, block,
      node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Where it lies, ${recipe.name}` }, table),
      node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `How it travels, ${recipe.name}` }, passes)),
    draw() {
      where.replaceChildren(...whereParts(recipe));
      block.textContent = blockText(recipe);
      const planes = recipe.planes.map((plane) => placeRow(plane, `plane:${plane.name}`, "stored"));
      const buffers = recipe.buffers.map((buffer) => placeRow(buffer, `buffer:${buffer.name}`, "read by a GEMM"));
      body.replaceChildren(...planes, ...buffers, ...recordRows(recipe));
      travels.replaceChildren(...recipe.passes.slice(0, 2).flatMap((pass) => passRows(recipe, pass)));
    },
  };
}

function whereParts(recipe) {
  const { row, column } = state;
  const rank = rankOf(recipe, row);
  const block = blockAt(recipe, row, column);
  const tag = (kind, words) => node("span", { class: `tag ${kind}` }, words);
  return [
    tag("element", `row ${number(row)}, column ${number(column)}`), " ",
    tag("block", `${block.name} block ${block.r}, ${block.c}`), " ",
    tag("rank", `rank ${rank}, its row ${number(row - cutsOf(recipe).ranks[rank][0])}`),
  ];
}

function blockText(recipe) {
  const { row, column } = state;
  const block = blockAt(recipe, row, column);
  const ranks = cutsOf(recipe).ranks.flatMap(([first, last], rank) => (
    first < last && first < block.bottom && last > block.top ? [rank] : []));
  const extent = `Its block is rows ${range(block.top, block.bottom - 1)} and columns ${range(block.left, block.right - 1)}`;
  if (ranks.length === 1) return `${extent}, all on one rank.`;
  const plane = recipe.planes.find((one) => one.kind === "scale" && one.sharded);
  const each = plane ? "which each store and send the block's scale" : "which agree on its amax";
  return `${extent}, cut between ranks ${ranks.slice(0, 8).join(", ")}${ranks.length > 8 ? ", …" : ""}, ${each}.`;
}

function placeRow(tensor, part, kind) {
  const map = mapOf(tensor.formula);
  const swizzled = tensor.swizzled ? mapOf(tensor.swizzled) : null;
  return node("tr", { class: `lightable ${tensor.kind}`, "data-part": part },
    node("th", { scope: "row" }, tensor.name, node("small", {}, `${tensor.format}, ${kind}`)),
    node("td", {}, map.index(state.row, state.column).join(", ")),
    node("td", { class: "place" }, placesText(map, map.positions(state.row, state.column))),
    node("td", {}, swizzled ? placesText(swizzled, swizzled.positions(state.row, state.column)) : "–"));
}

function passRows(recipe, pass) {
  const { row, column } = state;
  const own = rankOf(recipe, row);
  return recipe.planes.map((plane) => {
    const cells = [];
    if (pass.planes.includes(plane.name)) {
      const ranks = ranksOf(recipe, plane, row);
      cells.push(`rank${ranks.length > 1 ? "s" : ""} ${ranks.slice(0, 8).join(", ")}${ranks.length > 8 ? ", …" : ""}`,
        placeText(mapOf(plane.formula), sentAt(recipe, plane, row, column, own)) + (ranks.length > 1 ? ` of rank ${own}` : ""));
    } else cells.push(plane.sharded ? "not sent" : "alike on all ranks", plane.sharded ? "–" : "not gathered");
    return node("tr", { class: `lightable ${plane.kind}`, "data-part": `plane:${plane.name}` },
      node("th", { scope: "row" }, pass.name), node("td", {}, plane.name), cells.map((cell) => node("td", {}, cell)));
  });
}

// For screen readers: one sentence for each recipe.
function spoken() {
  return page.recipes.map((recipe) => {
    const block = blockAt(recipe, state.row, state.column);
    const plane = recipe.planes.find((one) => one.kind === "data");
    const map = mapOf(plane.formula);
    const [place] = map.positions(state.row, state.column);
    const name = page.recipes.length > 1 ? `${recipe.name}: ` : "";
    return `${name}row ${state.row}, column ${state.column}; block ${block.r}, ${block.c}; rank ${rankOf(recipe, state.row)}; `
      + `${placeText(map, place)} of ${plane.name}.`;
  }).join(" ");
}
