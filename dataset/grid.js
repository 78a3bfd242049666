// Draws a grid of cells on a page, as an <svg> of the class "grid".

const $ = (id) => document.getElementById(id);
const fraction = (share) => share.toFixed(2);
const ANEW = -2; // code of a search that restarts from scratch (models/lattice.py)
const isOne = (bits) => (bits & (bits - 1)) === 0;

function add(parent, name, attributes) {
  const element = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

// Draws a grid. cells: tokens, row by row; a negative token is not drawn. look: result of `page_style`
// (dataset/drawing.py), and `clues`, the set of tokens that are clues. puzzle: tokens of the input. confidences:
// from 0 to 1. changed, wrong: flags. selected: index of a cell. describe(cell, element): if given, adds a
// description to every cell. For a search: board: bits of the tokens that each cell may be. boardBefore: the board
// before the step. guess: index of a cell, or ANEW.
function drawGrid(svg, look, { cells, columns, puzzle, confidences, changed, wrong, selected, describe, board, boardBefore, guess }) {
  const rows = cells.length / columns;
  const fine = Math.min(0.075, 0.009 * Math.max(columns, rows)); // width of strokes, in cells; they look alike in all sizes
  const isField = look.first_of_field !== null;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `-0.04 -0.04 ${columns + 0.08} ${rows + 0.08}`);
  if (!isField) add(svg, "rect", { class: "ground", width: columns, height: rows });
  const isClue = cells.map((token, cell) => puzzle?.[cell] === token && look.clues.has(token));
  const corner = (cell) => ({ x: cell % columns, y: Math.floor(cell / columns) });
  const addSquare = (cell, attributes) => add(svg, "rect", { ...corner(cell), width: 1, height: 1, ...attributes });
  cells.forEach((token, cell) => {
    if (token < 0) return;
    const color = look.colors[token], isBlank = !look.symbols[token];
    if (isClue[cell] && !color && !isBlank) {
      addSquare(cell, { class: "clue-ground" });
    } else if (!isBlank && (color || confidences)) {
      const chance = 1 / look.vocab_size;
      const sure = confidences && !isClue[cell] ? Math.max(0, (confidences[cell] - chance) / (1 - chance)) : 1;
      const opacity = color ? 0.2 + 0.8 * sure : 0.04 + 0.26 * sure * sure;
      addSquare(cell, { class: "cell", fill: color ?? "var(--accent)", "fill-opacity": opacity.toFixed(3) });
    }
  });
  let path = "";
  cells.forEach((token, cell) => {
    const { x, y } = corner(cell); // in a field, draw lines only around the cells of the grid
    if (token >= 0 && !(isField && !look.symbols[token])) path += `M${x} ${y}h1v1h-1z`;
  });
  add(svg, "path", { class: "lines", d: path, "stroke-width": fine / 2.5 });
  if (look.regions) {
    const region = look.regions, outside = (x, y) => x < 0 || y < 0 || x >= columns || y >= rows;
    const differs = (cell, x, y) => outside(x, y) || region[y * columns + x] !== region[cell];
    let borders = "";
    cells.forEach((token, cell) => {
      const { x, y } = corner(cell);
      if (differs(cell, x - 1, y)) borders += `M${x} ${y}v1`;
      if (differs(cell, x, y - 1)) borders += `M${x} ${y}h1`;
      if (x === columns - 1) borders += `M${x + 1} ${y}v1`;
      if (y === rows - 1) borders += `M${x} ${y + 1}h1`;
    });
    add(svg, "path", { class: "box", d: borders, "stroke-width": fine / 1.5, "stroke-linecap": "square" });
  }
  if (guess === ANEW) add(svg, "rect", { class: "anew", width: columns, height: rows, "stroke-width": fine });
  const side = Math.ceil(Math.sqrt(look.symbols.filter(Boolean).length)); // columns of the candidates inside a cell
  board?.forEach((bits, cell) => {
    if (isOne(bits)) return;
    const { x, y } = corner(cell), all = boardBefore ? bits | boardBefore[cell] : bits;
    [...look.symbols.keys()].filter((token) => look.symbols[token]).forEach((token, index) => {
      const symbol = look.symbols[token], color = look.colors[token];
      if (!(all >> token & 1)) return;
      const at = { x: x + 0.08 + 0.84 * (index % side + 0.5) / side, y: y + 0.08 + 0.84 * (Math.floor(index / side) + 0.5) / side };
      const kind = bits >> token & 1 ? "candidate" : "candidate struck";
      if (color) add(svg, "circle", { class: kind, cx: at.x, cy: at.y, r: 0.3 / side, style: `fill:${color}` });
      else add(svg, "text", { class: kind, ...at, style: `font-size:${0.78 / side}px` }).textContent = symbol;
    });
  });
  cells.forEach((token, cell) => {
    const { x, y } = corner(cell), symbol = look.symbols[token], color = look.colors[token];
    // On a colored background, draw only letters, such as a maze's S and G.
    if (symbol && (!color || /[A-Z]/.test(symbol))) {
      const kind = color ? "on-color" : isClue[cell] || !confidences ? "clue" : "";
      add(svg, "text", { class: kind, x: x + 0.5, y: y + 0.52 }).textContent = symbol;
    }
    const inner = { x: x + 0.07, y: y + 0.07, width: 0.86, height: 0.86, rx: 0.1, "stroke-width": fine };
    if (changed?.[cell]) {
      add(svg, "rect", { class: "halo", ...inner, "stroke-width": fine });
      add(svg, "rect", { class: "ring", ...inner });
    }
    if (cell === guess) add(svg, "rect", { class: "guess", ...inner, "stroke-dasharray": 0.12 });
    if (cell === selected) add(svg, "rect", { class: "selected", ...inner, "stroke-dasharray": 0.04 });
    if (wrong?.[cell]) add(svg, "circle", { class: "wrong", cx: x + 0.82, cy: y + 0.18, r: Math.min(0.12, 0.035 + 1.1 * fine), "stroke-width": fine });
    if (describe) describe(cell, addSquare(cell, { class: "hit", role: "img" }));
  });
}
