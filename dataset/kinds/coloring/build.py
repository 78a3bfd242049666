"""Builds a dataset of 3-coloring: different random graphs that have a coloring, and all their colorings.

Each edge of a graph exists with the same probability. A group of the training split is a graph, and its
puzzles are the graph with each of its right answers. So an epoch visits each graph once, with a random
answer. The test split has one example for each graph.

Invariant: no test graph is a training graph. With --split orbits, no test graph is a training graph with its
nodes in another order.
"""

import argparse
import functools

import numpy as np

from dataset.build import sources
from dataset.build.answers import split_classes, write_with_answers
from dataset.build.generation import draw_distinct
from dataset.build.splits import GENERATE
from dataset.kinds.coloring import SIZES, VOCAB_SIZE, count_answers, find_answers, make_inputs
from dataset.randomness import random_bits
from dataset.symmetry import GraphSymmetry
from runtime.command_line import integer

_GRAPHS_OF_A_DRAW = 256
_MOST_ANSWERS = 10_000_000  # of all graphs. With 10 nodes, this is a dataset of 2 GB, built in 5 GB of memory
_MAX_DRAWS = 400  # draws in a row without a new graph before giving up: a few seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    nodes = f"nodes of a graph, {SIZES[0]} to {SIZES[-1]} (default 8)"
    parser.add_argument("--nodes", type=integer(at_least=SIZES[0], at_most=SIZES[-1]), default=8, help=nodes)
    probability = "probability of each edge, greater than 0 and less than 1 (default 0.42)"
    parser.add_argument("--edge-probability", type=float, default=0.42, metavar="P", help=probability)
    generate = "number of training graphs. All graphs differ"
    parser.add_argument("--generate", type=integer(at_least=1), required=True, metavar="N", help=generate)
    num_test = "number of test graphs (default N // 10, at least 20)"
    parser.add_argument("--num-test", **sources.NUM_TEST | {"help": num_test})
    split = (
        "what to divide at random into training and test graphs. inputs: the graphs. orbits: classes of "
        "graphs that differ only in the order of their nodes. There may then be fewer test graphs, and more "
        "training graphs (default inputs)"
    )
    parser.add_argument("--split", choices=["inputs", "orbits"], default="inputs", help=split)


def check_options(options: argparse.Namespace) -> None:
    if not 0 < options.edge_probability < 1:
        raise ValueError(f"--edge-probability {options.edge_probability:g} is not between 0 and 1.")
    options.num_test = options.num_test or max(options.generate // 10, 20)


def build(options: argparse.Namespace) -> None:
    graph = {"num_nodes": options.nodes, "edge_probability": options.edge_probability}
    train, test = draw_distinct(
        functools.partial(_draw, seed=options.seed, **graph),
        num_train=options.generate,
        num_test=options.num_test,
        max_misses=_MAX_DRAWS,
        refusal=f"random graphs of {options.nodes} nodes gave {{count}} with a 3-coloring, then no new one. "
        "Lower --generate or --num-test, or change --edge-probability.",
    )
    train, test = train[:, 0], test[:, 0]
    graphs = np.concatenate([test, train])
    if (num := int(count_answers(graphs).sum())) > _MOST_ANSWERS:
        many = f"the {len(graphs)} graphs have {num} colorings, more than {_MOST_ANSWERS}"
        raise ValueError(f"{many}. Lower --generate or --nodes, or raise --edge-probability.")
    if options.split == "orbits":
        hashes = GraphSymmetry().hash_rows(graphs)
        _, firsts, numbers = np.unique(hashes, return_index=True, return_inverse=True)
        # A class has the number of its first graph, so that the split does not depend on the hash function.
        train, test = split_classes(graphs, firsts[numbers], most_tests=len(test), seed=options.seed)
    write_with_answers(
        options, train, test, kind="coloring", find_answers=find_answers, vocab_size=VOCAB_SIZE
    )


def _draw(split: str, index: int, *, seed: int, num_nodes: int, edge_probability: float) -> np.ndarray:
    num_pairs = num_nodes * (num_nodes - 1) // 2
    bits = random_bits(seed, stream=GENERATE[split], index=index, count=_GRAPHS_OF_A_DRAW * num_pairs)
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    inputs = make_inputs(uniform.reshape(-1, num_pairs) < edge_probability, num_nodes)
    return inputs[count_answers(inputs) > 0][:, None]
