// The spec, line by line: a line that is pointed at or chosen lights up what it decides, and shows the code that came of it.

const lit = { chosen: null, parts: [] };

function specBox(recipe) {
  const decides = node("p", { class: "note", "aria-live": "polite" });
  const code = node("div", { class: "scroll code", tabindex: 0, role: "region", "aria-label": `Generated lines, ${recipe.name}` });
  const lines = node("ol", { class: "code" });
  const prompt = "Point at a line, or press it to keep it lit.";
  decides.textContent = prompt;

  function show(line, isOver) {
    const parts = isOver ? line.parts : lit.chosen ? lit.chosen.parts : [];
    light(lines.closest("article"), parts);
    decides.textContent = parts.length ? `Decides ${[...new Set(parts.map(partText))].join(", ")}.` : prompt;
    code.replaceChildren(...generatedFor(recipe, parts));
  }

  for (const line of recipe.spec) {
    const item = node("li");
    if (!line.parts.length) item.append(node("span", { class: "line" }, line.text || " "));
    else {
      const button = node("button", {
        type: "button", class: "line", "aria-pressed": "false",
        onpointerenter: () => show(line, true), onpointerleave: () => show(line, false),
        onfocus: () => show(line, true), onblur: () => show(line, false),
        onclick: () => {
          const keep = lit.chosen !== line;
          for (const other of lines.querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
          lit.chosen = keep ? line : null;
          button.setAttribute("aria-pressed", String(keep));
          show(line, keep);
        },
      }, line.text);
      button.dataset.parts = line.parts.join(" ");
      item.append(button);
    }
    lines.append(item);
  }
  code.replaceChildren(...generatedFor(recipe, []));
  return {
    box: node("section", { class: "spec" }, node("h3", {}, "The spec"),
      node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `The spec of ${recipe.name}` }, lines), decides, node("h3", {}, "Generated from it"), code),
    // Rows of tables light up the lines that decide them.
    reverse(parts) {
      for (const button of lines.querySelectorAll("button")) {
        button.classList.toggle("lit", parts.some((part) => button.dataset.parts.split(" ").includes(part)));
      }
    },
  };
}

const partText = (part) => {
  const [kind, name] = part.split(":");
  const words = {
    shape: "the shapes that it takes", cuts: "where cuts cost nothing", swizzle: "the swizzle",
    products: "products in low precision", files: "how other checkpoint formats hold it",
  };
  return words[kind] || (kind === "block" ? `${name} blocks` : `${kind} ${name}`);
};

function light(article, parts) {
  lit.parts = parts;
  for (const one of article.querySelectorAll(".lightable")) one.classList.toggle("lit", parts.includes(one.dataset.part));
}

function generatedFor(recipe, parts) {
  const found = [];
  for (const [file, lines] of recipe.generated) {
    const mine = lines.map((line, i) => [line, i]).filter(([line]) => line.parts.some((part) => parts.includes(part)));
    if (!mine.length) continue;
    found.push(node("h4", {}, file));
    const list = node("ol", { class: "code numbered" });
    for (const [line, i] of mine) list.append(node("li", { value: i + 1 }, node("span", { class: "line" }, line.text)));
    found.push(list);
  }
  if (found.length) return found;
  return [node("p", { class: "note" }, parts.length
    ? "No line of the generated layout, tensor or kernels names it: it is in their numbers." : "Lines of generated code appear here.")];
}
