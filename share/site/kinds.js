// The kinds of puzzles: what may be drawn into a grid, what an answer must fulfil, and how puzzles are made up.
//
// A kind has: name; hint; tokens, which may be put into a cell; blank, the token of an empty one; isClue(token), what
// of a question stays; check(question, answer, puzzle): {ok, text, cells}, cells being those that are wrong, or
// null where it is not known; problem(question): what is wrong with a question, or null; and perhaps
// paints, draw(question, cell, token), generate().

export function kindOf(facts) {
  const make = { sudoku: facts.box && sudoku, maze, arc }[facts.kind] || plain;
  return make(facts);
}

const range = (first, end) => Array.from({ length: end - first }, (_, index) => first + index);

function shuffled(items) {
  const mixed = [...items];
  for (let last = mixed.length - 1; last > 0; last--) {
    const other = Math.floor(Math.random() * (last + 1));
    [mixed[last], mixed[other]] = [mixed[other], mixed[last]];
  }
  return mixed;
}

const count = (cells) => (cells.length === 1 ? "1 cell" : `${cells.length} cells`);

/** Compares with the known answer, of a puzzle that is as it was; a label of -1 counts nowhere. */
function compare(answer, puzzle) {
  if (!puzzle.labels) return null;
  const cells = range(0, answer.length).filter((cell) => ![-1, answer[cell]].includes(puzzle.labels[cell]));
  return { ok: !cells.length, text: cells.length ? `${count(cells)} wrong` : "right", cells };
}

// Any other puzzle: grids of symbols, without rules that are known here.
function plain(facts) {
  const tokens = range(0, facts.vocab_size);
  return {
    name: `puzzles of ${facts.rows} × ${facts.columns} cells`,
    hint: "Choose a cell and what goes into it.",
    tokens,
    blank: 0,
    isClue: () => false,
    problem: () => null,
    check: (question, answer, puzzle) => compare(answer, puzzle),
  };
}

function arc() {
  const hint = "The model learned these tasks from their examples; it sees only the test input.";
  return { ...plain({ vocab_size: 0 }), name: "ARC tasks", hint }; // which are shown, not drawn
}

// Sudoku ----------------------------------------------------------------------------------------------------
// Tokens: 1 is empty, 2 .. n + 1 are the digits.

const EMPTY = 1, DIGIT_1 = 2, AXES = [0, 1, 2];
const GUESSES = 3000; // of a search: a second or two

function numBits(mask) {
  let number = 0;
  for (; mask; mask &= mask - 1) number++;
  return number;
}

function sudoku({ rows: size, box: [boxRows, boxColumns] }) {
  const cells = range(0, size * size), digits = range(DIGIT_1, DIGIT_1 + size);
  const every = digits.reduce((mask, digit) => mask | (1 << digit), 0);
  const unitsOf = (cell) => {
    const row = Math.floor(cell / size), column = cell % size;
    return [row, column, Math.floor(row / boxRows) * boxRows + Math.floor(column / boxColumns)];
  };
  const units = cells.map(unitsOf); // the numbers of its row, column and box
  const peers = cells.map((cell) => cells.filter(
    (other) => other !== cell && units[cell].some((unit, axis) => units[other][axis] === unit),
  ));

  /** The cells whose digit is twice in a row, column or box. */
  const conflicts = (grid) => cells.filter(
    (cell) => grid[cell] >= DIGIT_1 && peers[cell].some((other) => grid[other] === grid[cell]),
  );

  /** Finds up to so many solutions; digits are tried in the order of `order`. Null: not within so many guesses. */
  function solve(question, limit, order = digits, guesses = GUESSES) {
    const grid = [...question], found = [], taken = new Int32Array(3 * size);
    const unitOf = (cell, axis) => axis * size + units[cell][axis];
    const left = (cell) => ~(taken[unitOf(cell, 0)] | taken[unitOf(cell, 1)] | taken[unitOf(cell, 2)]) & every;
    const put = (cell, digit) => {
      for (const axis of AXES) taken[unitOf(cell, axis)] ^= 1 << (digit || grid[cell]);
      grid[cell] = digit || EMPTY;
    };

    /** Returns the fewest ways on that there are, [cell, digit] each: in a cell, or for a digit in a unit. */
    function waysOn() {
      let best = null;
      const once = new Int32Array(3 * size), twice = new Int32Array(3 * size);
      for (const cell of cells) {
        if (grid[cell] >= DIGIT_1) continue;
        const mask = left(cell), number = numBits(mask);
        if (!best || number < best.length) best = order.filter((digit) => mask & (1 << digit)).map((digit) => [cell, digit]);
        if (number < 2) return best;
        for (const axis of AXES) {
          const unit = unitOf(cell, axis);
          twice[unit] |= once[unit] & mask;
          once[unit] |= mask;
        }
      }
      if (once.some((mask, unit) => (mask | taken[unit]) !== every)) return []; // a digit has no cell
      for (const cell of best ? cells : []) {
        if (grid[cell] >= DIGIT_1) continue;
        for (const axis of AXES) {
          const unit = unitOf(cell, axis), single = left(cell) & once[unit] & ~twice[unit];
          if (single) return [[cell, 31 - Math.clz32(single)]];
        }
      }
      return best;
    }

    function search() {
      const ways = waysOn();
      if (!ways) found.push([...grid]);
      if (ways?.length > 1 && --guesses < 0) return;
      for (const [cell, digit] of ways ?? []) {
        put(cell, digit);
        search();
        put(cell, 0);
        if (found.length >= limit || guesses < 0) return;
      }
    }

    cells.filter((cell) => grid[cell] >= DIGIT_1).forEach((cell) => put(cell, grid[cell]));
    search();
    return guesses < 0 && found.length < limit ? null : found;
  }

  /** Makes a puzzle with exactly one solution: every clue is needed, or in a large grid half of the cells are clues. */
  function generate() {
    const isLarge = size > 9;
    let answer, numClues = cells.length;
    while (!answer) { // of 100 searches for a large grid, one to three take too long: another begins
      const start = cells.map(() => EMPTY);
      shuffled(digits).forEach((digit, column) => (start[column] = digit));
      [answer] = solve(start, 1, shuffled(digits), 2 * cells.length) ?? [];
    }
    const inputs = [...answer];
    for (const cell of shuffled(cells)) {
      if (isLarge && numClues <= cells.length / 2) break;
      inputs[cell] = EMPTY;
      if (solve(inputs, 2, digits, isLarge ? 0 : GUESSES)?.length === 1) numClues--;
      else inputs[cell] = answer[cell];
    }
    return { inputs, labels: answer };
  }

  return {
    name: `${size} × ${size} Sudoku`,
    hint: "Choose a cell and type a digit, or paste a whole puzzle.",
    tokens: [...digits, EMPTY],
    blank: EMPTY,
    isClue: (token) => token >= DIGIT_1,
    generate,
    problem(question) {
      if (conflicts(question).length) return "two clues contradict each other";
      const found = solve(question, 2);
      if (!found || found.length === 1) return null; // or too hard to say
      return found.length ? "several answers are right" : "there is no answer";
    },
    check(question, answer) {
      const lost = cells.filter((cell) => question[cell] >= DIGIT_1 && answer[cell] !== question[cell]);
      const wrong = [...new Set([...conflicts(answer), ...lost, ...cells.filter((cell) => answer[cell] < DIGIT_1)])];
      return { ok: !wrong.length, text: wrong.length ? `${count(wrong)} wrong` : "solved", cells: wrong };
    },
  };
}

// Mazes -----------------------------------------------------------------------------------------------------

const WALL = 1, OPEN = 2, START = 3, GOAL = 4, PATH = 5;
const TRIES = 400; // random mazes; the one with the longest way is taken

function maze({ rows: size }) {
  const cells = range(0, size * size);

  function neighbours(cell) {
    const column = cell % size;
    return [cell - size, cell + size, ...(column ? [cell - 1] : []), ...(column < size - 1 ? [cell + 1] : [])].filter(
      (other) => other >= 0 && other < size * size,
    );
  }

  /** The number of steps from the start to every cell; undefined where no way leads. */
  function distances(grid, isOpen) {
    const start = grid.indexOf(START), steps = new Array(size * size), queue = [start];
    if (start < 0) return steps;
    steps[start] = 0;
    for (const cell of queue) {
      for (const other of neighbours(cell)) {
        if (steps[other] !== undefined || !isOpen(other)) continue;
        steps[other] = steps[cell] + 1;
        queue.push(other);
      }
    }
    return steps;
  }

  const shortest = (grid) => distances(grid, (cell) => grid[cell] !== WALL)[grid.indexOf(GOAL)];

  return {
    name: `mazes of ${size} × ${size}`,
    hint: "Click cells to draw walls, or move start and goal.",
    tokens: [WALL, START, GOAL],
    paints: true,
    blank: OPEN,
    isClue: () => false,
    problem(question) {
      if (!question.includes(START) || !question.includes(GOAL)) return "a maze needs a start and a goal";
      return shortest(question) === undefined ? "no way leads from start to goal" : null;
    },
    draw(question, cell, token) {
      const grid = [...question];
      if (token !== WALL && grid.includes(token)) grid[grid.indexOf(token)] = OPEN;
      grid[cell] = token === WALL && question[cell] === WALL ? OPEN : token;
      return grid;
    },
    generate() {
      let best = null, longest = 0;
      for (let attempt = 0; attempt < TRIES; attempt++) {
        const share = 0.3 + 0.2 * Math.random();
        const grid = cells.map(() => (Math.random() < share ? WALL : OPEN));
        grid[Math.floor(Math.random() * cells.length)] = START;
        const steps = distances(grid, (cell) => grid[cell] !== WALL);
        const goal = cells.reduce((far, cell) => ((steps[cell] ?? 0) > (steps[far] ?? 0) ? cell : far), 0);
        if ((steps[goal] ?? 0) <= longest) continue;
        longest = steps[goal];
        grid[goal] = GOAL;
        best = grid;
      }
      return { inputs: best, labels: null };
    },
    check(question, answer) {
      const changed = cells.filter((cell) => answer[cell] !== question[cell]);
      const wrong = changed.filter((cell) => question[cell] !== OPEN || answer[cell] !== PATH);
      if (wrong.length) return { ok: false, text: "not this maze", cells: wrong };
      const marked = (cell) => [START, PATH, GOAL].includes(answer[cell]);
      const steps = distances(answer, marked), numMarked = cells.filter(marked).length;
      const reached = steps[answer.indexOf(GOAL)];
      if (reached === undefined) return { ok: false, text: "the path breaks off", cells: [] };
      if (reached + 1 < numMarked) return { ok: false, text: "marks beside the path", cells: [] };
      const isShortest = shortest(question) === reached;
      return { ok: true, text: isShortest ? "solved by a shortest path" : "solved, not by a shortest path", cells: [] };
    },
  };
}
