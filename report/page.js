// Charts: a tooltip at the point nearest to the pointer.
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

// Charts over several axes: buttons choose the axis.
for (const group of document.querySelectorAll(".axes")) {
  group.addEventListener("click", (event) => {
    const axis = event.target.dataset.axis;
    if (!axis) return;
    for (const button of group.children) button.setAttribute("aria-pressed", button.dataset.axis === axis);
    for (const part of document.querySelectorAll("[data-over]")) part.hidden = part.dataset.over !== axis;
  });
}

// ------------------------------------------------------------------------------------------------ the puzzles

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const count = (flags) => flags.filter(Boolean).length;

function addButton(parent, properties, onClick = null) {
  const button = Object.assign(document.createElement("button"), { type: "button", ...properties });
  if (onClick) button.addEventListener("click", onClick);
  parent.append(button);
  return button;
}

// The state of the page. list: puzzles in the map. timer: timer of the playback, or null.
const now = { puzzle: null, step: 1, list: [], timer: null };
let content = null, filters = [];

const wrongIn = (cells, { label } = now.puzzle, board = null) =>
  cells.map((token, cell) => label[cell] >= 0 && token !== label[cell] && (!board || isOne(board[cell])));
const isSameGrid = ({ input, label, input_columns, columns }) => input.length === label.length && input_columns === columns;

function showStep(number) {
  const { puzzle } = now, { steps } = content;
  const step = (now.step = Math.min(Math.max(number, 1), steps));
  $("step").value = step;
  $("step-name").textContent = `thinking step ${step} of ${steps}`;
  const cells = puzzle.answers[step - 1], before = step > 1 ? puzzle.answers[step - 2] : null;
  const board = content.has_candidates ? puzzle.candidates[step - 1] : null, guess = puzzle.guesses[step - 1];
  const goesOn = board && step > 1 && puzzle.guesses[step - 2] !== ANEW && guess !== ANEW;
  const boardBefore = goesOn ? puzzle.candidates[step - 2] : null;
  const changed = cells.map((token, cell) => before !== null && before[cell] !== token && guess !== ANEW);
  const confidences = puzzle.confidences[step - 1].map((percent) => percent / 100), wrong = wrongIn(cells, puzzle, board);
  const isField = content.first_of_field !== null;
  const seen = cells.map((token, cell) => (isField && puzzle.has_label && puzzle.label[cell] < 0 ? -1 : token));
  const given = isSameGrid(puzzle) ? puzzle.input : null;
  drawGrid($("answer"), content, { cells: seen, columns: puzzle.columns, puzzle: given, confidences, changed, wrong, board, boardBefore, guess });
  showFacts({ board, boardBefore, guess, counted: count(puzzle.label.map((token) => token >= 0)), numWrong: count(wrong),
    numChanged: before && count(changed), leastSure: Math.min(...confidences) });
  [...$("bars").children].forEach((bar, index) => bar.classList.toggle("now", index + 1 === step));
}

const numCandidates = (board) => board.reduce((sum, bits) => sum + bits.toString(2).replaceAll("0", "").length, 0);

function searchFacts({ board, boardBefore, guess }) {
  const { puzzle, step } = now, { columns } = puzzle, place = `row ${Math.floor(guess / columns) + 1}, column ${(guess % columns) + 1}`;
  const isSolved = puzzle.halts_at !== null && puzzle.halts_at <= step && board.every(isOne);
  return [
    ["candidates", numCandidates(board)],
    ["just removed", boardBefore ? numCandidates(boardBefore) - numCandidates(board) : "\u2013"],
    ["guess", guess < 0 ? "\u2013" : `${content.symbols[puzzle.answers[step - 1][guess]]} in ${place}`],
    ["this step", guess === ANEW ? "contradiction: the search restarts" : isSolved ? "solved" : "continues", guess === ANEW ? "bad" : isSolved ? "good" : ""],
  ];
}

function showFacts({ board, boardBefore, guess, counted, numWrong, numChanged, leastSure }) {
  const { puzzle, step } = now, name = puzzle.name || (content.hasSets ? puzzle.set : "");
  const facts = [
    ["puzzle", `${puzzle.row}${name ? `, ${name}` : ""}`],
    ...(counted && !board ? [["cells right", `${counted - numWrong} of ${counted}`, numWrong ? "bad" : "good"]] : []),
    ...(board ? searchFacts({ board, boardBefore, guess }) : [
      ["cells just changed", numChanged ?? "\u2013"],
      ["lowest confidence of a cell", fraction(leastSure)],
      ...(content.is_search ? [] : [["predicted probability of being right", fraction(puzzle.rated[step - 1] / 100)]]),
      ["would halt", puzzle.halts_at === null ? "never" : `after step ${puzzle.halts_at}`],
    ]),
  ];
  $("facts").replaceChildren();
  for (const [title, value, kind = ""] of facts) {
    add($("facts"), "dt", {}).textContent = title;
    add($("facts"), "dd", { class: kind }).textContent = value;
  }
}

function showPuzzle(puzzle, step = now.step) {
  now.puzzle = puzzle;
  const first = isSameGrid(puzzle) ? puzzle.input : null;
  drawGrid($("question"), content, { cells: puzzle.input, columns: puzzle.input_columns, puzzle: first });
  $("solution").style.display = puzzle.has_label ? "" : "none";
  $("no-solution").hidden = puzzle.has_label;
  drawGrid($("solution"), content, { cells: puzzle.label, columns: puzzle.columns, puzzle: first });
  [...$("bars").children].forEach((bar, index) => {
    bar.firstChild.style.height = `${puzzle.rated[index]}%`;
    bar.classList.toggle("halts", index + 1 === puzzle.halts_at);
    bar.title = `step ${index + 1}: ${fraction(puzzle.rated[index] / 100)}`;
  });
  for (const square of $("map").children) square.setAttribute("aria-selected", square.puzzle === puzzle);
  showStep(step);
}

function showList(list) {
  now.list = list;
  $("map").replaceChildren();
  for (const puzzle of list) {
    const { answers, has_label, label, name, row, stays_right_from: from } = puzzle, { steps } = content;
    const shareWrong = count(wrongIn(answers[steps - 1], puzzle)) / label.length;
    const depth = from ? 12 + (78 * (from - 1)) / Math.max(steps - 1, 1) : 40 + 60 * shareWrong;
    const outcome = !has_label ? "no label" : from ? `right from step ${from}` : puzzle.is_undecided ? "undecided" : "wrong";
    const className = !has_label || puzzle.is_undecided ? "unlabelled" : from ? "" : "failed";
    const title = `${row}${name ? ` ${name}` : ""}: ${outcome}`;
    const square = addButton($("map"), { tabIndex: -1, puzzle, role: "option", className, title });
    square.style.setProperty("--depth", `${depth}%`);
  }
  filters.forEach(({ button, puzzles }) => button.setAttribute("aria-pressed", puzzles === list));
}

function play(begins = now.timer === null) {
  clearInterval(now.timer);
  now.timer = null;
  $("play").classList.toggle("playing", begins);
  $("play").setAttribute("aria-label", begins ? "stop" : "play");
  if (!begins) return;
  const { steps } = content;
  if (now.step === steps) showStep(1);
  now.timer = setInterval(() => now.step < steps ? showStep(now.step + 1) : play(false), steps > 12 ? 350 : 800);
}

function goTo(step) {
  play(false);
  showStep(step);
}

function move(by) {
  const index = now.list.indexOf(now.puzzle) + by;
  if (now.list.length) showPuzzle(now.list[Math.min(Math.max(index, 0), now.list.length - 1)]);
}

function search(text) {
  text = text.trim().toLowerCase();
  $("found").textContent = "";
  if (!text) return;
  const { puzzles } = content;
  const found = puzzles.find(({ row }) => String(row) === text) ?? puzzles.find(({ name }) => name.toLowerCase().includes(text));
  if (!found) { $("found").textContent = `Puzzle not found on this page: ${text}.`; return; }
  if (!now.list.includes(found)) showList(puzzles);
  showPuzzle(found);
}

function onKey(event) {
  if (event.target.type === "search" || event.ctrlKey || event.metaKey || event.altKey) return;
  const { step } = now, back = () => goTo(step - 1), forth = () => goTo(step + 1);
  const keys = { ArrowLeft: back, ArrowRight: forth, j: () => move(1), k: () => move(-1), " ": () => play() };
  const action = keys[event.key];
  if (!action || (event.key === " " && event.target.tagName === "BUTTON")) return;
  event.preventDefault();
  action();
}

function watch(unpacked) {
  const { clues, puzzles, steps } = (content = unpacked);
  content.clues = new Set(clues);
  content.hasSets = new Set(puzzles.map((puzzle) => puzzle.set)).size > 1;
  const solved = puzzles.filter((puzzle) => puzzle.stays_right_from !== null);
  const failed = puzzles.filter((puzzle) => puzzle.has_label && puzzle.stays_right_from === null && !puzzle.is_undecided);
  const lists = { All: puzzles, Easiest: solved.slice(0, 24), "Hardest solved": solved.toReversed().slice(0, 24), Wrong: failed };
  if (content.is_search) lists["Undecided"] = puzzles.filter((puzzle) => puzzle.is_undecided);
  filters = Object.entries(lists).map(([name, list]) => {
    const onClick = () => { showList(list); showPuzzle(list[0]); };
    const labels = { textContent: `${name} ${list.length}`, disabled: !list.length };
    return { puzzles: list, button: addButton(document.querySelector(".filters"), labels, onClick) };
  });
  $("step").max = steps;
  $("step").parentNode.style.setProperty("--steps", steps);
  for (let step = 1; step <= steps; step++) {
    addButton($("bars"), { tabIndex: -1 }, () => goTo(step)).append(document.createElement("i"));
  }
  $("step").addEventListener("input", (event) => goTo(Number(event.target.value)));
  $("play").addEventListener("click", () => play());
  $("map").addEventListener("click", (event) => event.target.puzzle && showPuzzle(event.target.puzzle));
  $("search").addEventListener("input", (event) => search(event.target.value));
  document.addEventListener("keydown", onKey);
  showList(puzzles);
  showPuzzle(solved.at(-1) ?? puzzles[0], 1); // the puzzle that took the most steps to solve
}

if ($("pictures")) unpack($("pictures").textContent).then(watch);
