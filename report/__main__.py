"""Writes an HTML report of a run: learning curves, results, and puzzles solved step by step.

python -m report checkpoints/demo
python -m report RUN RUN ... [--output FILE] [--table FILE.md [--columns NAMES]]      compares runs
"""

import runtime.environment  # noqa: F401

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.command_line import OneLineParser, add_plugin_option, integer, one_line_errors, warn
from runtime.metrics_file import METRICS_FILE


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("report"):
        options = _parse_options(arguments)
        from report.compare import write_comparison
        from report.page import write_report

        warn_of = functools.partial(warn, "report")
        for run in options.runs:
            if re.fullmatch(r"step_\d+|best", run.name) and not (run / METRICS_FILE).exists():
                raise ValueError(f"{run} is a checkpoint, not a run folder. Pass {run.parent}.")
        if options.table:
            from report.table import write_table

            columns = options.columns and [name.strip() for name in options.columns.split(",")]
            write_table(options.runs, options.table, columns=columns)
            print(f"wrote {options.table}")
        if len(options.runs) > 1:
            output = options.output or Path("comparison.html")
            path = write_comparison(options.runs, output=output, warn=warn_of)
        else:
            keywords = {} if options.puzzles is None else {"num_puzzles": options.puzzles}
            keywords |= {"output": options.output, "data": options.data}
            path = write_report(options.runs[0], **keywords, warn=warn_of)
        print(f"wrote {path}")


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("report", description=__doc__.partition("\n")[0])
    add_plugin_option(parser)
    runs = "run folder, such as checkpoints/demo. Several run folders are compared"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=runs)
    output = "HTML file (default: RUN/report.html; for several runs, comparison.html in the current folder)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    table = "also write the comparison table to this file, as Markdown (.md), LaTeX (.tex) or CSV (.csv)"
    parser.add_argument("--table", type=Path, metavar="FILE", help=table)
    columns = (
        "columns of --table, separated by commas, such as 'solved,training time,sudoku/valid_accuracy': "
        "names of its columns, or metrics of the log (default: all columns that are not empty)"
    )
    parser.add_argument("--columns", metavar="NAMES", help=columns)
    data = "dataset folders to take the shown test puzzles from (default: the data of the run)"
    parser.add_argument("--data", type=Path, nargs="+", metavar="FOLDER", help=data)
    puzzles = (
        "number of test puzzles to run the model on, rounded up to a multiple of the test sets (default: "
        "400). A search or large puzzles may use fewer. 0: do not run it"
    )
    parser.add_argument("--puzzles", type=integer(at_least=0), metavar="N", help=puzzles)
    options = parser.parse_args(arguments)
    if len(options.runs) == 1 and options.table:
        raise ValueError("--table needs several runs to compare. Pass more run folders.")
    if options.columns and not options.table:
        raise ValueError("--columns chooses the columns of --table. Pass --table FILE.")
    if len(options.runs) > 1 and (options.data or options.puzzles is not None):
        raise ValueError("--data and --puzzles apply only to the report of one run. Remove them.")
    for index, run in enumerate(options.runs):
        if run.resolve() in (other.resolve() for other in options.runs[:index]):
            raise ValueError(f"the run folder {run} is listed twice. Pass each run folder only once.")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
