// Figures of the whole weight: what cuts cost, and bytes beside bf16. All of them were computed by layoutc.

const BF16 = 2; // bytes of an element

function cutsBox(recipe) {
  const picture = node("div", { class: "bars" });
  const words = node("p", { class: "note", id: `cuts-${recipe.name}` });
  const cost = node("ul", { class: "facts" });
  return {
    box: node("section", { class: "lightable", "data-part": "cuts" }, node("h3", {}, "Cuts between ranks"), picture, words, cost),
    draw() {
      picture.replaceChildren(cutsPicture(recipe));
      const [every, reason] = recipe.free_cuts;
      words.textContent = every === 1
        ? `A cut at any row costs nothing: ${reason}.` : `A cut at a multiple of ${every} rows costs nothing: ${reason}.`;
      cost.replaceChildren(...cutsFacts(recipe).map((fact) => node("li", {}, fact)));
    },
  };
}

function cutsPicture(recipe) {
  const { ranks } = cutsOf(recipe);
  const [width, height] = [640, 46];
  const scale = (row) => (row / state.m) * width;
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${height}`, class: "cuts", role: "img", "aria-label":
    `${number(state.m)} rows over ${plural(state.world, "rank")}; ${plural(cutsOf(recipe).inside, "cut")} inside of blocks.` });
  ranks.forEach(([first, last], rank) => {
    if (last === first) return;
    svg.append(node("svg:rect", { x: scale(first), y: 2, width: scale(last) - scale(first), height: 20, class: rank % 2 ? "rank odd" : "rank even" }));
    if (scale(last) - scale(first) > 44) svg.append(text(`rank ${rank}`, (scale(first) + scale(last)) / 2, 16, "ranktext"));
  });
  let ticks = "";
  const blocks = state.m / recipe.block_rows;
  if (recipe.block_rows > 1 && blocks <= 128) {
    for (let row = 0; row < state.m; row += recipe.block_rows) ticks += `M${scale(row)} 26V38`;
    svg.append(node("svg:path", { d: `${ticks}M${width} 26V38M0 32H${width}`, class: "blocks" }));
  }
  ranks.forEach(([first, last, , after]) => {
    if (last > first && last < state.m) svg.append(node("svg:path", { d: `M${scale(last)} 0V42`, class: after ? "cut inside" : "cut" }));
  });
  const at = scale(state.row + 0.5);
  svg.append(node("svg:path", { d: `M${at - 4} ${height}L${at} ${height - 7}L${at + 4} ${height}Z`, class: "pointer" }));
  return svg;
}

function cutsFacts(recipe) {
  const cuts = cutsOf(recipe);
  const withRows = cuts.ranks.filter(([first, last]) => last > first);
  const [each, short] = [withRows[0][1], withRows[withRows.length - 1]];
  const shortRows = short[1] - short[0];
  const facts = [`${plural(each, "row")} a rank${shortRows !== each ? `, the last ${number(shortRows)}` : ""}`
    + `${withRows.length < state.world ? `; ${plural(state.world - withRows.length, "rank")} without rows` : ""}.`];
  if (!cuts.inside) facts.push("No cut falls inside of a block.");
  if (!cuts.shards_have_buffers) facts.push("A shard has no buffers by itself: the gathered weight has them.");
  if (!cuts.inside) return facts;
  const figures = figuresOf(recipe).worlds[at.world];
  const more = recipe.passes.slice(0, 2).map((pass, i) => `${plural(figures[i * 3 + 2], "byte")} in ${pass.name}`).join(", ");
  const [first, last, before, after] = cuts.ranks[rankOf(recipe, state.row)];
  facts.push(
    `${cuts.inside} of ${plural(withRows.length - 1, "cut")} inside of a block of ${recipe.block_rows} rows; ${plural(cuts.parts, "rank")} with part of one.`,
    `The chosen row's rank has rows ${range(first, last - 1)}; its halo, the rest of the blocks that its cuts split, has ${plural(before + after, "row")}.`,
    `Sent besides, for scales that several ranks have: ${more} a rank.`,
    `Optimizer step: ${plural(figures[figures.length - 1], "byte")} a rank, ${recipe.exchanged === "extremes" ? "the least and greatest value" : "all values"} of each column of its first and last block.`,
  );
  const free = [];
  if (cuts.free_rows.length) free.push(`${either(cuts.free_rows)} rows over ${plural(state.world, "rank")}`);
  if (cuts.free_worlds.length) free.push(`${number(state.m)} rows over ${either(cuts.free_worlds)} ranks`);
  if (free.length) facts.push(`Without that cost: ${free.join(", or ")}.`);
  return facts;
}

function budgetBox(recipe) {
  const body = node("tbody");
  let drawn = "";
  const large = recipe.passes.slice(0, 2).map((pass) => `${pass.bytes_per_element.toFixed(4)} in ${pass.name}`).join(", ");
  return {
    box: node("section", {}, node("h3", {}, "Bytes, beside bf16"),
      node("p", { class: "note" }, `Of a large weight, a gather moves ${large} bytes for each element; bf16 ${BF16}.`),
      node("table", { class: "budget" },
        node("thead", {}, node("tr", {}, ["", "Bytes", "Of bf16", ""].map((head, i) => (i === 0 || i === 3
          ? node("td", {}) : node("th", { scope: "col" }, head))))), body),
      node("p", { class: "legend" }, [["data", "elements"], ["scale", "scales and zero points"], ["pad", "padding"], ["sent", "sent, of both"]]
        .map(([kind, words]) => node("span", {}, node("i", { class: `swatch ${kind}` }), words)))),
    draw() {
      const now = [state.m, state.k, state.world].join();
      if (now !== drawn) body.replaceChildren(...budgetRows(recipe));
      drawn = now;
    },
  };
}

function budgetRows(recipe) {
  const stop = figuresOf(recipe);
  const figures = stop.worlds[at.world];
  const whole = state.m * state.k * BF16;
  const kind = (tensor) => (tensor.kind === "data" ? 0 : 1);
  const rows = [["bf16, the whole weight", whole, [0, 0, 0], "plain"]];
  const sums = (tensors, bytes, padding) => tensors.reduce((sum, tensor, i) => {
    sum[kind(tensor)] += bytes[i] - (padding ? padding[i] : 0);
    sum[2] += padding ? padding[i] : 0;
    return sum;
  }, [0, 0, 0]);
  rows.push(["stored", null, sums(recipe.planes, stop.planes)]);
  for (const [orientation] of recipe.blocks) {
    const mine = recipe.buffers.map((one, i) => [one, i]).filter(([one]) => one.orientation === orientation);
    rows.push([`read ${orientation}`, null,
      sums(mine.map(([one]) => one), mine.map(([, i]) => stop.buffers[i]), mine.map(([, i]) => stop.padding[i]))]);
  }
  recipe.passes.slice(0, 2).forEach((pass, i) => {
    const sent = figures[i * 3] * state.world;
    rows.push([`gathered in ${pass.name}, all ranks`, sent, [0, 0, 0], "sent"]);
  });
  const totals = rows.map(([, stated, parts]) => stated ?? parts[0] + parts[1] + parts[2]);
  const longest = Math.max(...totals);
  return rows.map(([name, , parts, kindOfRow], i) => {
    const width = (part) => `width:${((100 * part) / longest).toFixed(2)}%`;
    const bars = kindOfRow ? [node("i", { class: kindOfRow, style: width(totals[i]) })]
      : ["data", "scale", "pad"].map((one, at) => node("i", { class: one, style: width(parts[at]) }));
    return node("tr", {}, node("th", { scope: "row" }, name), node("td", { class: "figure" }, number(totals[i])),
      node("td", { class: "figure" }, `${((100 * totals[i]) / whole).toFixed(1)} %`), node("td", { class: "bar" }, node("div", {}, bars)));
  });
}
