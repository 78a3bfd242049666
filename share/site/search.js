// A search (LDT) on boards: the model removes candidates of cells, and guesses values (models/lattice.py).

export const CHAINS = 4; // independent searches at the same time, with different random guesses
const SECONDS = 60; // time limit, after which the search ends without an answer
const NO_GUESS = -1; // ANEW (grid.js) means that the board was reset

const logit = (share) => Math.log(share / (1 - share));

/** Searches in CHAINS chains. Then yields the moves of the first chain with an answer, or else of the first chain.
 *
 * look: Runs the model on the candidates of all chains (0 or 1). onRound: Called with the number of each round. If it
 * returns a falsy value, the search ends. A move has the values of a thinking step (`Model.reason`). In addition, it has
 * board: the candidates of each cell as bits; guess: the guessed cell or a negative code; total: the number of moves.
 */
export async function* searching(look, facts, inputs, onRound) {
  const { values, candidates } = facts.search, size = inputs.length * values.length;
  const entered = Float32Array.from(inputs.flatMap((token) => candidates[token]));
  const boards = Array.from({ length: CHAINS }, () => entered.slice());
  const rounds = boards.map(() => []), end = performance.now() + 1000 * SECONDS;
  let answer = 0;
  for (let round = 1; round <= facts.steps && performance.now() < end; round++) {
    if (!onRound(round)) return;
    const alive = new Float32Array(CHAINS * size);
    boards.forEach((board, chain) => alive.set(board, chain * size));
    const { keep, digit, conflict } = await look(alive);
    const of = (output, chain) => output.data.subarray(chain * size, (chain + 1) * size);
    const outcomes = boards.map((board, chain) => {
      const outputs = { keep: of(keep, chain), digit: of(digit, chain), conflict: conflict.data[chain] };
      const outcome = move(board, entered, outputs, facts.search);
      rounds[chain].push({ ...describe(board, inputs, values), ...outcome });
      return outcome;
    });
    answer = Math.max(outcomes.findIndex(({ stops }) => stops), 0);
    if (outcomes[answer].stops) break;
  }
  for (const round of rounds[answer]) yield { ...round, total: rounds[answer].length };
}

/** Removes candidates of a board in place, and guesses a cell. Resets the board if it is contradictory. */
function move(board, entered, { keep, digit, conflict }, facts) {
  // A model of an older page has neither decision_cell nor temperature.
  const { values, kill_threshold, conflict_threshold, decision_cell, temperature = 0 } = facts;
  const width = values.length, open = [];
  let isContradictory = conflict > logit(conflict_threshold);
  for (let first = 0; first < board.length; first += width) {
    const cell = range(first, first + width), isGiven = count(entered, cell) === 1;
    for (const entry of cell) if (!isGiven && keep[entry] < logit(kill_threshold)) board[entry] = 0;
    const left = count(board, cell);
    if (!left) isContradictory = true;
    if (left > 1) open.push(cell);
  }
  if (isContradictory) {
    board.set(entered);
    return { guess: ANEW, stops: false };
  }
  if (!open.length) return { guess: NO_GUESS, stops: true };
  const fewest = Math.min(...open.map((cell) => count(board, cell)));
  const cells = decision_cell === "fewest" ? open.filter((cell) => count(board, cell) === fewest) : open;
  const cell = cells[Math.floor(Math.random() * cells.length)].filter((entry) => board[entry]);
  // With Gumbel noise, the value with the largest score is a sample of the softmax.
  const noise = () => temperature && -temperature * Math.log(-Math.log(Math.random()));
  const scores = cell.map((entry) => digit[entry] + noise());
  const value = cell[scores.indexOf(Math.max(...scores))];
  for (const entry of cell) board[entry] = entry === value ? 1 : 0;
  return { guess: Math.floor(value / width), stops: false };
}

const range = (first, end) => Array.from({ length: end - first }, (_, index) => first + index);
const count = (board, entries) => entries.reduce((sum, entry) => sum + board[entry], 0);

/** Returns a board as a thinking step. A cell with one candidate has that value, any other cell its input. */
function describe(board, inputs, values) {
  const cells = inputs.map((_, cell) => values.filter((_, value) => board[cell * values.length + value]));
  return {
    tokens: cells.map((tokens, cell) => (tokens.length === 1 ? tokens[0] : inputs[cell])),
    confidence: cells.map(() => 1),
    board: cells.map((tokens) => tokens.reduce((bits, token) => bits | (1 << token), 0)),
    halt: cells.filter((tokens) => tokens.length === 1).length / cells.length,
  };
}
