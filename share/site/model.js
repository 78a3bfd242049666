// The model: onnxruntime-web runs model.onnx, which computes one thinking step, in the browser.

import { CHAINS, searching } from "./search.js";
import * as ort from "./ort.wasm.bundle.min.mjs";

// Use one thread, because more need special headers from the server. Use a worker, so that the page stays responsive.
ort.env.wasm.numThreads = 1;
ort.env.wasm.proxy = true;
ort.env.wasm.wasmPaths = { wasm: new URL("./ort-wasm-simd-threaded.wasm", import.meta.url).href };

export class Model {
  /** Loads model.onnx from a folder. facts: Content of page.json. */
  static async load(facts, folder) {
    const session = await ort.InferenceSession.create(new URL(`./${folder}/model.onnx`, import.meta.url).href, {
      executionProviders: ["wasm"],
    });
    return new Model(session, facts);
  }

  constructor(session, facts) {
    this.session = session;
    this.facts = facts;
  }

  /** Returns an async iterator over the thinking steps. onRound: Called with the number of each round of a search. */
  think(inputs, identifier, onRound) {
    const { search } = this.facts;
    if (!search) return this.reason(inputs, identifier);
    const look = (alive) => this.session.run({ alive: new ort.Tensor("float32", alive, [CHAINS, inputs.length, search.values.length]) });
    return searching(look, this.facts, inputs, onRound);
  }

  /** Yields the answer after each thinking step, endlessly.
   *
   * tokens, confidence: Most likely token of each cell, and its probability. halt: Predicted probability that the
   * answer is right. stops: Whether the model would halt here.
   */
  async *reason(inputs, identifier) {
    const { state: shapes, vocab_size: size, loss_type } = this.facts;
    const names = Object.keys(shapes);
    const kept = names.map((name) => new Float32Array(shapes[name].reduce((a, b) => a * b, 1)));
    for (let step = 1; ; step++) {
      // Create new tensors in each step, because their memory is transferred to the worker.
      const feeds = {
        inputs: new ort.Tensor("int32", Int32Array.from(inputs), [1, inputs.length]),
        puzzle_identifiers: new ort.Tensor("int32", Int32Array.of(identifier), [1]),
      };
      if (names.length) feeds.starts = new ort.Tensor("bool", Uint8Array.of(step === 1), [1]);
      names.forEach((name, index) => {
        feeds[name] = new ort.Tensor("float32", kept[index], [1, ...shapes[name]]);
      });
      const outputs = await this.session.run(feeds);
      names.forEach((name, index) => (kept[index] = outputs[`next_${name}`].data));
      const qHalt = outputs.q_halt.data[0];
      const stops = outputs.wants_to_halt.data[0] === 1;
      yield { ...readOff(outputs.logits.data, size, loss_type === "stablemax_cross_entropy"), halt: 1 / (1 + Math.exp(-qHalt)), stops };
    }
  }
}

// Probabilities by stablemax or softmax, as `PROBABILITIES` in models/objective.py.
function readOff(logits, size, hasStablemax) {
  const count = logits.length / size;
  const tokens = new Array(count), confidence = new Array(count);
  for (let cell = 0; cell < count; cell++) {
    const row = logits.subarray(cell * size, (cell + 1) * size);
    let best = 0, sum = 0;
    for (let token = 1; token < size; token++) if (row[token] > row[best]) best = token;
    const weight = (x) => (!hasStablemax ? Math.exp(x - row[best]) : x < 0 ? 1 / (1 - x) : x + 1);
    for (let token = 0; token < size; token++) sum += weight(row[token]);
    tokens[cell] = best;
    confidence[cell] = weight(row[best]) / sum;
  }
  return { tokens, confidence };
}
