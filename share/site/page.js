// The page: a grid that a user can edit, and the answers of the model after each thinking step.

import { kindOf } from "./kinds.js";
import { Model } from "./model.js";
import { CHAINS } from "./search.js";

// The model of the link, else the first one with the size of its puzzle. Example: #model=demo&puzzle=1..4........4..1
const models = await (await fetch("models.json")).json();
const asked = new URLSearchParams(location.hash.slice(1));
const fits = (text) => (each) => each.rows * each.columns === text?.length;
const chosen = models.find((each) => each.name === asked.get("model")) ?? models.find(fits(asked.get("puzzle"))) ?? models[0];
const folder = encodeURIComponent(chosen.name);
const facts = await (await fetch(`${folder}/page.json`)).json();
const kind = kindOf(facts);
const look = {
  ...facts,
  symbols: facts.symbols.map((symbol, token) => (facts.colors[token] ? " " : symbol)), // shown by its color
  clues: new Set([...facts.symbols.keys()].filter(kind.isClue)),
  first_of_field: null, // `grid` crops the field to the cells to draw
};
const LONGER = [1, 2, 4, 16]; // selectable numbers of steps, as multiples of facts.steps
const model = Model.load(facts, folder);
// Whether a puzzle can be written as text: one character for each cell, "." only for a blank one.
const isText = kind.tokens.length > 0 && kind.tokens.every(
  (token) => token === kind.blank || (facts.symbols[token].length === 1 && facts.symbols[token] !== "."),
);

// The state of the page. shown: number of the step; 0 is the question. selected: selected cell.
const now = { puzzle: null, thoughts: [], shown: 0, selected: 0, brush: kind.tokens[0], total: facts.steps };
let source = null; // iterator over the steps of the model on this puzzle
let isReady = false; // whether the model is loaded
let playing = null; // an object that identifies the playback; a playback ends when this changes

// Rendering ---------------------------------------------------------------------------------------------

const rowOf = (cell) => Math.floor(cell / facts.columns), columnOf = (cell) => cell % facts.columns;
const answerAt = (step) => (step ? now.thoughts[step - 1].tokens : now.puzzle.inputs);

/** Returns the cells to show, row by row: the smallest rectangle that contains all cells of the grid `frame`. */
function grid(frame) {
  const all = [...frame.keys()];
  const inside = all.filter((cell) => facts.first_of_field === null || frame[cell] >= facts.first_of_field);
  const range = (along) => {
    const found = (inside.length ? inside : [0]).map(along);
    return [Math.min(...found), Math.max(...found)];
  };
  const [top, bottom] = range(rowOf), [left, right] = range(columnOf);
  const isShown = (row, column) => top <= row && row <= bottom && left <= column && column <= right;
  return { cells: all.filter((cell) => isShown(rowOf(cell), columnOf(cell))), columns: right - left + 1 };
}

function render() {
  const { puzzle, shown } = now;
  const tokens = answerAt(shown), before = shown ? answerAt(shown - 1) : tokens;
  const thought = shown ? now.thoughts[shown - 1] : null;
  const verdict = thought && kind.check(puzzle.inputs, tokens, puzzle);
  const wrong = new Set(verdict?.cells ?? []);
  const isLast = shown === now.total || (shown && thought.stops);
  const isOpen = facts.search && isLast && !thought.stops; // a search without an answer
  const { cells, columns } = grid(shown && puzzle.labels ? puzzle.labels : tokens);
  const isEditable = kind.tokens.length > 0, shownOf = (values) => cells.map((cell) => values[cell]);
  drawGrid($("board"), look, {
    cells: shownOf(tokens),
    columns,
    puzzle: shownOf(puzzle.inputs),
    confidences: thought && shownOf(thought.confidence),
    changed: cells.map((cell) => tokens[cell] !== before[cell] && thought?.guess !== ANEW),
    wrong: isLast && !isOpen && cells.map((cell) => wrong.has(cell)),
    ...(facts.search && shown ? boardOf(shown, cells) : {}),
    selected: isEditable && !shown ? cells.indexOf(now.selected) : null,
    describe: (number, element) => {
      const cell = cells[number], sure = thought ? `${fraction(thought.confidence[cell])} sure` : "";
      const what = `row ${rowOf(cell) + 1}, column ${columnOf(cell) + 1}: ${facts.symbols[tokens[cell]] || "empty"}`;
      element.dataset.cell = cell;
      element.setAttribute("aria-label", [what, sure].filter(Boolean).join(", "));
      add(element, "title", {}).textContent = sure;
    },
  });
  const board = $("board"), rows = cells.length / columns;
  board.classList.toggle("editable", isEditable);
  board.setAttribute("viewBox", `0 0 ${columns} ${rows}`); // the border is outside
  board.style.setProperty("--ratio", columns / rows);
  renderWords(thought, verdict, isLast, isOpen);
  renderBars();
  renderQuestion();
  $("slider").max = now.total;
  $("slider").value = shown;
  $("play").disabled = !isReady;
  $("play").textContent = !isReady ? "Loading the model" : playing ? "Pause" : shown === now.total ? "Play again" : "Play";
  document.body.dataset.step = shown;
}

/** Returns the candidates of the shown cells after and before a move of a search. */
function boardOf(step, cells) {
  const { board, guess } = now.thoughts[step - 1], before = now.thoughts[step - 2];
  const goesOn = before && ![guess, before.guess].includes(ANEW);
  const shownOf = (bits) => cells.map((cell) => bits[cell]);
  return { board: shownOf(board), boardBefore: goesOn ? shownOf(before.board) : null, guess: guess < 0 ? guess : cells.indexOf(guess) };
}

function renderWords(thought, verdict, isLast, isOpen) {
  const { puzzle, shown } = now;
  const name = puzzle.number ? `Puzzle ${puzzle.number} of ${facts.puzzles.length}` : puzzle.from;
  const changed = shown ? thought.tokens.filter((token, cell) => token !== answerAt(shown - 1)[cell]).length : 0;
  const cells = `${changed || "nothing"} changed`;
  const event = thought?.guess === ANEW ? "contradiction: the search restarts" : cells;
  $("where").textContent = shown ? `Thinking step ${shown} of ${now.total} \u00b7 ${event}` : puzzle.name ?? name;
  const element = $("verdict");
  const problem = shown ? null : kind.problem(puzzle.inputs);
  element.className = problem ? "bad" : verdict ? (verdict.ok ? "good" : isLast ? "bad" : "open") : "";
  if (isOpen) element.className = "open";
  element.textContent = problem ?? (isOpen ? "undecided" : verdict ? (verdict.ok || isLast ? verdict.text : "still thinking") : "");
}

function renderBars() {
  const bars = $("bars"), count = now.total + 1;
  bars.classList.toggle("many", count > 24);
  $("slider").style.setProperty("--count", count);
  if (bars.childElementCount !== count) {
    bars.replaceChildren(...Array.from({ length: count }, (_, step) => {
      const bar = Object.assign(document.createElement("button"), { type: "button", tabIndex: -1 });
      bar.innerHTML = `<b><i></i></b><span>${step}</span>`;
      bar.addEventListener("click", () => goTo(step));
      return bar;
    }));
  }
  const first = now.thoughts.findIndex((thought) => thought.stops) + 1;
  [...bars.children].forEach((bar, step) => {
    const thought = step ? now.thoughts[step - 1] : null;
    bar.className = [step === now.shown && "shown", step === first && first && "stops", step > now.thoughts.length && "open"]
      .filter(Boolean).join(" ");
    bar.firstChild.firstChild.style.height = thought ? `max(2px, ${thought.halt * 100}%)` : "0";
    const share = facts.search ? "of the cells decided" : "probability of being right";
    bar.title = thought ? `step ${step}: ${fraction(thought.halt)} ${share}` : step ? `step ${step}` : "the question";
  });
  if (facts.search) {
    const searches = now.isSearching ? `Searching with ${CHAINS} chains, round ${now.isSearching}. ` : "";
    $("halting").textContent = `${searches}The bars show the fraction of decided cells, in the chain that found the answer.`;
    return;
  }
  const isDone = now.thoughts.length >= now.total;
  const stop = first ? ` The model would halt after step ${first}.` : isDone ? " The model would not halt yet." : "";
  $("halting").textContent = `The bars show the predicted probability that the answer is right.${stop}`;
}

function renderQuestion() {
  const isWanted = facts.first_of_field !== null && now.shown > 0;
  $("question").hidden = !isWanted;
  if (!isWanted) return;
  const { cells, columns } = grid(now.puzzle.inputs);
  drawGrid($("mini"), look, { cells: cells.map((cell) => now.puzzle.inputs[cell]), columns });
  $("mini").style.width = `${Math.min(150, 18 * columns)}px`;
}

// Actions ----------------------------------------------------------------------------------------------

function pose(puzzle) {
  $("hint").textContent = kind.hint;
  playing = null;
  source = null;
  Object.assign(now, { puzzle: { identifier: facts.puzzles[0].identifier, ...puzzle }, thoughts: [], shown: 0, isSearching: 0 });
  if (facts.search) now.total = facts.steps;
  const text = write(puzzle.inputs); // too short if the grid is smaller than its field
  history.replaceState(null, "", link(chosen.name, isText && read(text) ? text : puzzle.number));
  render();
}

const link = (name, puzzle) => `#${new URLSearchParams({ ...(models.length > 1 && { model: name }), ...(puzzle && { puzzle }) })}`;

/** Returns a puzzle as text, with a symbol for each cell, for a link or for pasting. */
const write = (inputs) => inputs.map((token) => (token === kind.blank ? "." : facts.symbols[token])).join("");
const cellsOf = (text) => text.replace(kind.paints ? /[\r\n]/g : /\s/g, ""); // a space may be an open cell

/** Returns the token with a symbol, else the one with the same letter in the other case, else -1. */
function tokenOf(symbol, tokens) {
  const [exact, folded] = [(each) => each, (each) => each.toLowerCase()].map((fold) =>
    tokens.find((token) => facts.symbols[token] && fold(facts.symbols[token]) === fold(symbol)));
  return exact ?? folded ?? -1;
}

/** Returns the tokens of a text such as 1..4 .... .... 4..1, or null if it is not a puzzle of this size. */
function read(text) {
  const tokens = [...cellsOf(text)].map((symbol) => {
    const token = tokenOf(symbol, [...facts.symbols.keys()]);
    return token < 0 && /[.0_\s]/.test(symbol) ? kind.blank : token;
  });
  return tokens.length === facts.rows * facts.columns && !tokens.includes(-1) ? tokens : null;
}

/** Shows the puzzle of the link. The link has it as text, or as a number if it cannot be written as text. */
function poseLinked(text) {
  const tokens = isText && text !== null ? read(text) : null;
  const index = tokens ? facts.puzzles.findIndex(({ inputs }) => `${inputs}` === `${tokens}`) : text - 1;
  if (facts.puzzles[index]) pose({ ...facts.puzzles[index], number: index + 1 });
  else if (tokens) pose({ inputs: tokens, labels: null, from: "The puzzle of a link" });
  else next();
}

/** Shows the next puzzle of the list. After the last one, or after a puzzle of the user, shows the first. */
function next() {
  const index = (now.puzzle?.number ?? 0) % facts.puzzles.length;
  pose({ ...facts.puzzles[index], number: index + 1 });
}

/** Shows a puzzle of the user. It keeps the identifier: the puzzle still belongs to that task. */
function poseOwn(inputs) {
  pose({ inputs, labels: null, identifier: now.puzzle.identifier, from: "Your own puzzle" });
}

function put(cell, token) {
  const { inputs } = now.puzzle;
  poseOwn(kind.draw ? kind.draw(inputs, cell, token) : inputs.with(cell, token));
}

/** Runs the model up to a step; resolves to false if another puzzle was chosen meanwhile. */
async function think(step) {
  const { puzzle } = now;
  const loaded = await model;
  if (now.puzzle !== puzzle) return false;
  source ??= loaded.think(puzzle.inputs, puzzle.identifier, (round) => {
    if (now.puzzle !== puzzle) return false; // the search ends
    now.isSearching = round;
    renderBars();
    return true;
  });
  while (now.puzzle === puzzle && now.thoughts.length < Math.min(step, now.total)) {
    const { value } = await source.next();
    if (now.puzzle !== puzzle || !value) break;
    now.thoughts.push(value);
    if (facts.search) Object.assign(now, { total: value.total, isSearching: 0 });
  }
  return now.puzzle === puzzle;
}

async function goTo(step) {
  playing = null;
  const wanted = Math.max(0, Math.min(step, now.total)), mine = (now.wish = {});
  if ((await think(wanted)) && now.wish === mine) { // no later wish
    now.shown = Math.min(wanted, now.total);
    render();
  }
}

async function play() {
  if (!isReady) return;
  if (playing) {
    playing = null;
    return render();
  }
  const mine = (playing = now.wish = {});
  if (now.shown === now.total) now.shown = 0;
  render();
  while (playing === mine && now.shown < now.total) {
    if (!(await think(now.shown + 1)) || playing !== mine) return;
    now.shown += 1;
    if (now.shown === now.total) playing = null;
    render();
    const isStill = answerAt(now.shown).every((token, cell) => token === answerAt(now.shown - 1)[cell]);
    await new Promise((resolve) => setTimeout(resolve, Number($("speed").value) / (isStill ? 4 : 1)));
  }
}

// Editing and keyboard -----------------------------------------------------------------------------------------------------

function choose(token) {
  if (kind.paints) now.brush = token;
  else put(now.selected, token);
  renderPalette();
}

function renderPalette() {
  const count = kind.tokens.length;
  $("palette").hidden = !count;
  $("palette").style.setProperty("--keys", count > 6 ? Math.min(Math.ceil(count / 2), 8) : count);
  $("palette").replaceChildren(...kind.tokens.map((token) => {
    const color = facts.colors[token];
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.textContent = kind.names?.[token] ?? (color ? "" : facts.symbols[token] || "×");
    button.setAttribute("aria-label", facts.symbols[token] || "empty");
    if (color) button.append(Object.assign(document.createElement("i"), { style: `background:${color}` }));
    if (kind.paints) button.setAttribute("aria-pressed", token === now.brush);
    button.addEventListener("click", () => choose(token));
    return button;
  }));
}

function onBoard(event) {
  const cell = event.target.dataset?.cell;
  if (cell === undefined || !kind.tokens.length) return;
  now.selected = Number(cell);
  if (kind.paints) put(now.selected, now.brush);
  else render();
}

function move(key) {
  const { rows, columns } = facts;
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
  const clamp = (value, size) => Math.max(0, Math.min(value, size - 1));
  now.selected = clamp(rowOf(now.selected) + down, rows) * columns + clamp(columnOf(now.selected) + right, columns);
  render();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /SELECT|INPUT/.test(event.target.tagName)) return;
  const key = event.key.toLowerCase();
  const token = key.trim() ? tokenOf(event.key, kind.tokens) : -1;
  const back = () => goTo(now.shown - 1), on = () => goTo(now.shown + 1);
  const acts = { p: play, n: next, ",": back, ".": on, pageup: back, pagedown: on }; // a symbol of the puzzle takes precedence over a key
  if (event.key.startsWith("Arrow") && kind.tokens.length) move(event.key);
  else if (token >= 0) put(now.selected, token);
  else if (["backspace", "delete", "0"].includes(key) && kind.tokens.length) put(now.selected, kind.blank);
  else if (acts[key]) acts[key]();
  else if (kind.paints && [" ", "enter"].includes(key) && event.target.tagName !== "BUTTON") put(now.selected, now.brush);
  else return;
  event.preventDefault();
}

/** Shows a pasted puzzle. If it has another size, opens a model for that size. */
function onPaste(event) {
  if (!kind.tokens.length) return;
  event.preventDefault();
  const text = event.clipboardData.getData("text"), tokens = read(text);
  if (tokens) return poseOwn(tokens);
  const cells = cellsOf(text), other = models.find((each) => each.kind === facts.kind && fits(cells)(each));
  if (other && other !== chosen) location.hash = link(other.name, cells);
  else $("hint").textContent = `The pasted text is not such a puzzle. Paste ${facts.rows * facts.columns} cells, with . for an empty cell.`;
}

async function copyLink() {
  if (!navigator.clipboard) return void prompt("The link", location.href); // not available over http, except on localhost
  await navigator.clipboard.writeText(location.href);
  $("copy").textContent = "Link copied";
  setTimeout(() => ($("copy").textContent = "Copy link"), 1600);
}

function explain() {
  const hasClues = look.clues.size > 0;
  for (const part of document.querySelectorAll(".given, .given-words")) part.hidden = !hasClues;
  if (!kind.hasRules) $("wrong-words").textContent = "differs from the known answer";
  for (const part of document.querySelectorAll(".of-step, .of-search")) part.hidden = part.classList.contains("of-step") === !!facts.search;
  $("arrows").hidden = !kind.tokens.length;
  const steps = facts.steps === 1 ? "in one pass" : `in ${facts.steps} steps`;
  const does = facts.search ? `searches through ${kind.name}` : `answers ${kind.name} ${steps}`;
  $("facts").textContent = `${facts.arch}, ${facts.parameters.toLocaleString("en")} parameters, ${does}. It runs in this browser and sends nothing to a server.`;
  document.title = `Watch it think: ${kind.name}`;
  $("more").hidden = facts.search || !Object.keys(facts.state).length;
  $("steps").replaceChildren(...LONGER.map((times) => new Option(`${times * facts.steps}`, times * facts.steps)));
}

function start() {
  explain();
  renderPalette();
  poseLinked(asked.get("puzzle"));
  $("choice").hidden = models.length < 2;
  $("here").hidden = !$("choice").hidden;
  $("model").replaceChildren(...models.map(({ name, title }) => new Option(title, name, false, name === chosen.name)));
  $("model").addEventListener("change", () => (location.hash = link($("model").value)));
  addEventListener("hashchange", () => location.reload());
  $("copy").addEventListener("click", copyLink);
  $("play").addEventListener("click", play);
  $("next").addEventListener("click", next);
  const { made_up: madeUp } = facts;
  $("generate").hidden = !madeUp.length;
  $("generate").addEventListener("click", () => {
    pose({ ...madeUp[Math.floor(Math.random() * madeUp.length)], from: "A new puzzle" });
  });
  $("clear").hidden = !kind.tokens.length;
  $("clear").addEventListener("click", () => poseOwn(now.puzzle.inputs.map(() => kind.blank)));
  $("slider").addEventListener("input", () => goTo(Number($("slider").value)));
  $("steps").addEventListener("change", () => {
    now.total = Number($("steps").value);
    goTo(Math.min(now.shown, now.total));
  });
  $("board").addEventListener("click", onBoard);
  document.addEventListener("keydown", onKey);
  document.addEventListener("paste", onPaste);
  $("app").hidden = false;
}

start();
await model;
isReady = true;
render();
document.body.dataset.ready = "";
