// The kinds of puzzles: what a user may enter into a grid, and how an answer is checked.
//
// A kind has these properties:
//   name, hint: texts for the user
//   tokens: tokens that a user may put into a cell; blank: token of an empty cell
//   isClue(token): whether the answer keeps the token
//   check(question, answer, puzzle): {ok, text, cells: wrong cells}, or null if the answer is unknown. Without
//     rules, it compares with the known answer, although a puzzle may have several right answers
//   problem(question): text of an error in the question, or null
//   optionally hasRules, paints, names (words for tokens), and draw(question, cell, token)

export function kindOf(facts) {
  const make = facts.groups ? distinct : { maze, arc, queens, coloring }[facts.kind] || plain;
  return make(facts);
}

const range = (first, end) => Array.from({ length: end - first }, (_, index) => first + index);

const count = (cells) => (cells.length === 1 ? "1 cell" : `${cells.length} cells`);

/** Returns the result of `check` for an answer with these wrong cells. */
function judge(cells) {
  return { ok: !cells.length, text: cells.length ? `${count(cells)} wrong` : "solved", cells };
}

/** Compares with the known answer. Returns null if the user edited the puzzle. Skips cells with label -1. */
function compare(answer, puzzle) {
  if (!puzzle.labels) return null;
  const cells = range(0, answer.length).filter((cell) => ![-1, answer[cell]].includes(puzzle.labels[cell]));
  return { ok: !cells.length, text: cells.length ? `differs from the known answer in ${count(cells)}` : "right", cells };
}

// Default for all other puzzles: a grid of symbols, without known rules. If grids fill the token array, the first token
// without a symbol, except padding, is an empty cell.
function plain(facts) {
  const all = range(0, facts.vocab_size), values = all.filter((token) => facts.symbols[token]); // without padding and end tokens
  const empty = facts.first_of_field === null ? all.filter((token) => token && !facts.symbols[token]).slice(0, 1) : [];
  const tokens = [...values, ...empty];
  const kept = new Set(), lost = new Set(); // a token is a clue if all answers keep it
  for (const { inputs, labels } of facts.puzzles ?? []) {
    inputs.forEach((token, cell) => labels[cell] === -1 || (token === labels[cell] ? kept : lost).add(token));
  }
  return {
    name: `${facts.plural} of ${facts.rows} × ${facts.columns} cells`,
    hint: "Choose a cell and its symbol, or paste a complete puzzle.",
    tokens,
    blank: values.find((token) => [".", "_", " ", "0"].includes(facts.symbols[token])) ?? empty[0] ?? tokens[0] ?? 0,
    isClue: (token) => facts.symbols[token] && kept.has(token) && !lost.has(token),
    problem: () => null,
    check: (question, answer, puzzle) => compare(answer, puzzle),
  };
}

function arc() {
  const hint = "The model learned these tasks from their examples; it sees only the test input.";
  return { ...plain({ vocab_size: 0, symbols: [] }), name: "ARC tasks", hint }; // tasks can only be shown, not edited
}

// Puzzles with a single rule: the symbols within each group of cells differ. Example: Sudoku. -----------------
// facts.groups: lists of cells. A token with a symbol is a value. The first token without one, except padding, is empty.
// A cell with padding (token 0) in the question is outside of the board, and is not checked.

function distinct({ rows, columns, groups, symbols, plural }) {
  const cells = range(0, rows * columns), empty = symbols.findIndex((symbol, token) => token && !symbol);
  const values = range(0, symbols.length).filter((token) => symbols[token]);
  const peers = cells.map((cell) => new Set(groups.filter((group) => group.includes(cell)).flat()));
  peers.forEach((others, cell) => others.delete(cell));

  /** Returns the cells with a symbol that occurs twice in a group. */
  const conflicts = (grid) => cells.filter(
    (cell) => symbols[grid[cell]] && [...peers[cell]].some((other) => grid[other] === grid[cell]),
  );

  return {
    name: `${rows} × ${columns} ${plural}`,
    hint: "Choose a cell and type its value, or paste a complete puzzle.",
    tokens: [...values, empty],
    blank: empty,
    isClue: (token) => !!symbols[token],
    hasRules: true,
    problem: (question) => (conflicts(question).length ? "two clues contradict each other" : null),
    check(question, answer) {
      const lost = cells.filter((cell) => symbols[question[cell]] && answer[cell] !== question[cell]);
      const open = cells.filter((cell) => question[cell] && !symbols[answer[cell]]);
      return judge([...new Set([...conflicts(answer), ...lost, ...open])]);
    },
  };
}

// Puzzles with several right answers: N-Queens and graph coloring ------------------------------------------

function queens(facts) {
  const EMPTY = 1, QUEEN = 2, { rows: size } = facts, cells = range(0, size * size);

  function attacks(one, other) {
    const down = Math.floor(one / size) - Math.floor(other / size), right = (one % size) - (other % size);
    return one !== other && (!down || !right || Math.abs(down) === Math.abs(right));
  }

  return {
    ...plain(facts),
    hasRules: true,
    check(question, answer) {
      const placed = cells.filter((cell) => answer[cell] === QUEEN);
      const isRight = (cell) => (answer[cell] === QUEEN
        ? !placed.some((other) => attacks(cell, other))
        : answer[cell] === EMPTY && question[cell] !== QUEEN);
      const wrong = cells.filter((cell) => !isRight(cell));
      if (!wrong.length && placed.length < size) return { ok: false, text: "too few queens", cells: [] };
      return judge(wrong);
    },
  };
}

// Cell (i, j) says whether an edge joins nodes i and j. Cell (i, i) is node i. Only nodes of an answer count.
function coloring(facts) {
  const EDGE = 2, COLORS = [4, 5, 6], { rows: size } = facts;
  const nodes = range(0, size).map((node) => node * (size + 1));
  return {
    ...plain(facts),
    hasRules: true,
    check(question, answer) {
      const joined = (node) => nodes.filter((_, other) => question[node * size + other] === EDGE);
      return judge(nodes.filter((cell, node) => !COLORS.includes(answer[cell])
        || joined(node).some((other) => answer[other] === answer[cell])));
    },
  };
}

// Mazes -----------------------------------------------------------------------------------------------------

const WALL = 1, OPEN = 2, START = 3, GOAL = 4, PATH = 5;

function maze({ rows: size }) {
  const cells = range(0, size * size);

  function neighbours(cell) {
    const column = cell % size;
    return [cell - size, cell + size, ...(column ? [cell - 1] : []), ...(column < size - 1 ? [cell + 1] : [])].filter(
      (other) => other >= 0 && other < size * size,
    );
  }

  /** Returns the distance of each cell from the start, undefined for cells that cannot be reached. */
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
    hasRules: true,
    names: { [WALL]: "wall", [START]: "start", [GOAL]: "goal" },
    paints: true,
    blank: OPEN,
    isClue: () => false,
    problem(question) {
      if (!question.includes(START) || !question.includes(GOAL)) return "a maze needs a start and a goal";
      return shortest(question) === undefined ? "no path leads from start to goal" : null;
    },
    draw(question, cell, token) {
      const grid = [...question];
      if (token !== WALL && grid.includes(token)) grid[grid.indexOf(token)] = OPEN;
      grid[cell] = token === WALL && question[cell] === WALL ? OPEN : token;
      return grid;
    },
    check(question, answer) {
      const changed = cells.filter((cell) => answer[cell] !== question[cell]);
      const wrong = changed.filter((cell) => question[cell] !== OPEN || answer[cell] !== PATH);
      if (wrong.length) return { ok: false, text: "changes the maze", cells: wrong };
      const marked = (cell) => [START, PATH, GOAL].includes(answer[cell]);
      const steps = distances(answer, marked), numMarked = cells.filter(marked).length;
      const reached = steps[answer.indexOf(GOAL)];
      if (reached === undefined) return { ok: false, text: "the path breaks off", cells: [] };
      if (reached + 1 < numMarked) return { ok: false, text: "marks cells beside the path", cells: [] };
      const isShortest = shortest(question) === reached;
      return { ok: true, text: isShortest ? "solved by a shortest path" : "solved, not by a shortest path", cells: [] };
    },
  };
}
