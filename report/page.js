"use strict";

// Light and dark: as the system has it, until a person says otherwise.
{
  const root = document.documentElement;
  const remembered = (action) => { try { return action(localStorage); } catch { return null; } };
  const chosen = remembered((store) => store.getItem("theme"));
  if (chosen) root.dataset.theme = chosen;
  document.querySelector(".theme").addEventListener("click", () => {
    const isDark = getComputedStyle(root).colorScheme === "dark" ||
      (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = isDark ? "light" : "dark";
    remembered((store) => store.setItem("theme", root.dataset.theme));
  });
}

// Charts: the point nearest to the pointer says what it is.
for (const chart of document.querySelectorAll(".chart")) {
  const points = JSON.parse(chart.dataset.points);
  const plot = chart.querySelector(".plot"), picture = plot.querySelector("svg");
  const spot = document.createElement("i"), tip = document.createElement("span");
  spot.className = "spot"; tip.className = "tip";
  const leave = () => { spot.remove(); tip.remove(); };
  plot.addEventListener("pointermove", (event) => {
    const frame = picture.getBoundingClientRect(), scale = frame.width / picture.viewBox.baseVal.width;
    const x = (event.clientX - frame.left) / scale, y = (event.clientY - frame.top) / scale;
    let nearest = null, least = Infinity;
    for (const point of points) {
      const distance = (point[0] - x) ** 2 * 4 + (point[1] - y) ** 2;
      if (distance < least) { least = distance; nearest = point; }
    }
    if (!nearest) return;
    tip.textContent = nearest[2];
    plot.append(spot, tip);
    const half = tip.offsetWidth / 2, left = nearest[0] * scale;
    spot.style.left = `${left}px`;
    tip.style.left = `${Math.min(Math.max(left, half), Math.max(frame.width - half, half))}px`;
    spot.style.top = tip.style.top = `${nearest[1] * scale}px`;
  });
  plot.addEventListener("pointerleave", leave);
}

// Charts over several axes: one is shown.
for (const group of document.querySelectorAll(".axes")) {
  group.addEventListener("click", (event) => {
    const axis = event.target.dataset.axis;
    if (!axis) return;
    for (const button of group.children) button.setAttribute("aria-pressed", button.dataset.axis === axis);
    for (const part of document.querySelectorAll("[data-over]")) part.hidden = part.dataset.over !== axis;
  });
}

// ------------------------------------------------------------------------------------------------ the puzzles

const $ = (id) => document.getElementById(id);

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function fraction(percent) {
  return (percent / 100).toFixed(2);
}

function add(parent, name, attributes) {
  const element = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

// Draws a grid into an <svg>. cells: tokens row by row, below 0 where there is nothing; the rest says of each
// cell what is to be seen of it.
function drawGrid(svg, look, { cells, columns, puzzle = null, confidences = null, changed = null, wrong = null }) {
  const rows = cells.length / columns;
  const fine = Math.min(0.075, 0.009 * Math.max(columns, rows)); // strokes, in cells, look alike in all sizes
  svg.replaceChildren();
  svg.setAttribute("viewBox", `-0.04 -0.04 ${columns + 0.08} ${rows + 0.08}`);
  if (!look.is_field) add(svg, "rect", { class: "ground", width: columns, height: rows });
  const isClue = cells.map((token, cell) => puzzle !== null && puzzle[cell] === token && look.clues.has(token));
  const place = (cell) => ({ x: cell % columns, y: Math.floor(cell / columns) });
  cells.forEach((token, cell) => {
    if (token < 0) return;
    const color = look.colors[token], isBlank = look.blanks.has(token);
    if (isClue[cell] && !color && !isBlank) {
      add(svg, "rect", { class: "clue-ground", ...place(cell), width: 1, height: 1 });
    } else if (!isBlank && (color || confidences)) {
      const chance = 100 / look.num_tokens;
      const sure = confidences && !isClue[cell] ? Math.max(0, (confidences[cell] - chance) / (100 - chance)) : 1;
      const opacity = color ? 0.2 + 0.8 * sure : 0.04 + 0.26 * sure * sure;
      const fill = color || "var(--accent)";
      add(svg, "rect", { class: "cell", ...place(cell), width: 1, height: 1, fill, "fill-opacity": opacity.toFixed(3) });
    }
  });
  let path = "";
  cells.forEach((token, cell) => {
    const { x, y } = place(cell); // a grid in a field ends where its cells do
    if (token >= 0 && !(look.is_field && look.blanks.has(token))) path += `M${x} ${y}h1v1h-1z`;
  });
  add(svg, "path", { class: "lines", d: path, "stroke-width": fine / 2.5 });
  if (look.box) {
    let boxes = "";
    for (let x = 0; x <= columns; x += look.box[1]) boxes += `M${x} 0V${rows}`;
    for (let y = 0; y <= rows; y += look.box[0]) boxes += `M0 ${y}H${columns}`;
    add(svg, "path", { class: "box", d: boxes, "stroke-width": fine / 1.5, "stroke-linecap": "square" });
  }
  cells.forEach((token, cell) => {
    const { x, y } = place(cell);
    const symbol = token < 0 ? "" : look.symbols[token], color = look.colors[token];
    // On a ground of its own colour only a letter, such as a maze's S and G, says more.
    if (symbol && !look.blanks.has(token) && (!color || /[A-Z]/.test(symbol))) {
      const kind = color ? "on-color" : isClue[cell] || !confidences ? "clue" : "";
      add(svg, "text", { class: kind, x: x + 0.5, y: y + 0.52 }).textContent = symbol;
    }
    if (changed && changed[cell]) {
      add(svg, "rect", { class: "halo", x: x + 0.07, y: y + 0.07, width: 0.86, height: 0.86, rx: 0.1, "stroke-width": 2 * fine });
      add(svg, "rect", { class: "ring", x: x + 0.07, y: y + 0.07, width: 0.86, height: 0.86, rx: 0.1, "stroke-width": fine });
    }
    if (wrong && wrong[cell]) add(svg, "circle", { class: "wrong", cx: x + 0.82, cy: y + 0.18, r: Math.min(0.12, 0.035 + 1.1 * fine), "stroke-width": fine });
  });
}

function watch(content) {
  const { puzzles, steps } = content;
  const look = { ...content, blanks: new Set(content.blanks), clues: new Set(content.clues) };
  const failed = puzzles.filter((puzzle) => puzzle.has_label && puzzle.stays_right_from === null);
  const solved = puzzles.filter((puzzle) => puzzle.stays_right_from !== null);
  const few = (list) => list.slice(0, 24);
  const filters = [
    ["All", puzzles],
    ["Easiest", few(solved)],
    ["Hardest solved", few([...solved].reverse())],
    ["Wrong", failed],
  ];
  let shown = puzzles, puzzle = null, step = 1, timer = null;

  const wrongIn = (cells, { label } = puzzle) => cells.map((token, cell) => label[cell] >= 0 && token !== label[cell]);
  const shareWrong = (each) => wrongIn(each.answers[steps - 1], each).filter(Boolean).length / each.label.length;
  const isSameGrid = () => puzzle.input.length === puzzle.label.length && puzzle.input_columns === puzzle.columns;

  function fact(name, value, kind = "") {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name; dd.textContent = value; dd.className = kind;
    $("facts").append(dt, dd);
  }

  function showStep(number) {
    step = Math.min(Math.max(number, 1), steps);
    $("step").value = step;
    $("step-name").textContent = `step ${step} of ${steps}`;
    const cells = puzzle.answers[step - 1], before = step > 1 ? puzzle.answers[step - 2] : null;
    const changed = cells.map((token, cell) => before !== null && before[cell] !== token);
    const wrong = wrongIn(cells), counted = puzzle.label.filter((token) => token >= 0).length;
    const given = isSameGrid() ? puzzle.input : null;
    const seen = cells.map((token, cell) => (look.is_field && puzzle.has_label && puzzle.label[cell] < 0 ? -1 : token));
    drawGrid($("answer"), look, {
      cells: seen, columns: puzzle.columns, puzzle: given, confidences: puzzle.confidences[step - 1], changed, wrong,
    });
    const sure = puzzle.confidences[step - 1], numWrong = wrong.filter(Boolean).length;
    const numChanged = changed.filter(Boolean).length;
    $("facts").replaceChildren();
    const name = puzzle.name || (content.sets > 1 ? puzzle.set : "");
    fact("puzzle", `${puzzle.row}${name ? `, ${name}` : ""}`);
    if (counted) fact("cells right", `${counted - numWrong} of ${counted}`, numWrong ? "bad" : "good");
    fact("cells just changed", before ? String(numChanged) : "\u2013");
    fact("least sure of a cell", fraction(Math.min(...sure)));
    fact("Q head: it is right", fraction(puzzle.rated[step - 1]));
    fact("would halt", `after step ${puzzle.halts_at}`);
    [...$("bars").children].forEach((bar, place) => bar.classList.toggle("now", place + 1 === step));
  }

  function showPuzzle(chosen, number = null) {
    puzzle = chosen;
    const first = isSameGrid() ? puzzle.input : null;
    drawGrid($("question"), look, { cells: puzzle.input, columns: puzzle.input_columns, puzzle: first });
    $("solution").style.display = puzzle.has_label ? "" : "none";
    $("no-solution").hidden = puzzle.has_label;
    drawGrid($("solution"), look, { cells: puzzle.label, columns: puzzle.columns, puzzle: first });
    [...$("bars").children].forEach((bar, place) => {
      bar.firstChild.style.height = `${puzzle.rated[place]}%`;
      bar.classList.toggle("halts", place + 1 === puzzle.halts_at);
      bar.title = `step ${place + 1}: ${fraction(puzzle.rated[place])}`;
    });
    for (const square of $("map").children) square.setAttribute("aria-selected", square.puzzle === puzzle);
    showStep(number ?? step);
  }

  function showList(list) {
    shown = list;
    $("map").replaceChildren(...list.map((each) => {
      const square = document.createElement("button");
      square.type = "button"; square.tabIndex = -1; square.puzzle = each;
      square.setAttribute("role", "option");
      const from = each.stays_right_from;
      const depth = from ? 12 + (78 * (from - 1)) / Math.max(steps - 1, 1) : 40 + 60 * shareWrong(each);
      square.style.setProperty("--depth", `${depth}%`);
      square.className = !each.has_label ? "unlabelled" : from ? "" : "failed";
      square.title = `${each.row}${each.name ? ` ${each.name}` : ""}: ` +
        (!each.has_label ? "no label" : from ? `right from step ${from}` : "wrong");
      return square;
    }));
    for (const [number, button] of [...document.querySelectorAll(".filters button")].entries()) {
      button.setAttribute("aria-pressed", filters[number][1] === list);
    }
  }

  function play(begins = timer === null) {
    clearInterval(timer);
    timer = null;
    $("play").classList.toggle("playing", begins);
    $("play").setAttribute("aria-label", begins ? "stop" : "play");
    if (!begins) return;
    if (step === steps) showStep(1);
    timer = setInterval(() => step < steps ? showStep(step + 1) : play(false), steps > 12 ? 350 : 800);
  }

  function move(by) {
    const place = shown.indexOf(puzzle) + by;
    if (shown.length) showPuzzle(shown[Math.min(Math.max(place, 0), shown.length - 1)]);
  }

  function search(text) {
    text = text.trim().toLowerCase();
    $("found").textContent = "";
    if (!text) return;
    const found = puzzles.find((each) => String(each.row) === text) ||
      puzzles.find((each) => each.name.toLowerCase().includes(text));
    if (!found) { $("found").textContent = `No puzzle ${text} is on this page.`; return; }
    if (!shown.includes(found)) showList(puzzles);
    showPuzzle(found);
  }

  content.sets = new Set(puzzles.map((each) => each.set)).size;
  $("step").max = steps;
  $("step").parentNode.style.setProperty("--steps", steps);
  $("bars").replaceChildren(...Array.from({ length: steps }, (_, place) => {
    const bar = document.createElement("button");
    bar.type = "button"; bar.tabIndex = -1;
    bar.append(document.createElement("i"));
    bar.addEventListener("click", () => { play(false); showStep(place + 1); });
    return bar;
  }));
  document.querySelector(".filters").replaceChildren(...filters.map(([name, list]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${name} ${list.length}`;
    button.disabled = !list.length;
    button.addEventListener("click", () => { showList(list); showPuzzle(list[0]); });
    return button;
  }));
  $("step").addEventListener("input", (event) => { play(false); showStep(Number(event.target.value)); });
  $("play").addEventListener("click", () => play());
  $("map").addEventListener("click", (event) => event.target.puzzle && showPuzzle(event.target.puzzle));
  $("search").addEventListener("input", (event) => search(event.target.value));
  document.addEventListener("keydown", (event) => {
    if (event.target.type === "search" || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = {
      ArrowLeft: () => { play(false); showStep(step - 1); },
      ArrowRight: () => { play(false); showStep(step + 1); },
      j: () => move(1),
      k: () => move(-1),
      " ": () => play(),
    }[event.key];
    if (!action || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    action();
  });
  showList(puzzles);
  // The first to be seen is one that takes the model a few steps.
  showPuzzle(solved[solved.length - 1] || puzzles[0], 1);
}

if ($("pictures")) unpack($("pictures").textContent).then(watch);
