"""Logs a run to TensorBoard: scalars, the config as text, and pictures of puzzles."""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

from runtime.metrics_file import read_rows
from runtime.writing import to_yaml
from training.loggers import PICTURES, LoggedRun

if TYPE_CHECKING:
    from training.pictures import Thoughts


class TensorBoard:
    """Logger that writes TensorBoard files into the folder `tensorboard` of the run folder.

    If the folder does not contain such files yet, the logger first writes the rows of metrics.jsonl. If the
    run resumes from a checkpoint, TensorBoard no longer shows values that were logged after the step of this
    checkpoint.
    """

    name = "tensorboard"

    def __init__(self, run: LoggedRun):
        folder, step = run.folder / "tensorboard", run.steps.start
        is_new = not any(folder.glob("events.*"))
        self._writer = SummaryWriter(str(folder), purge_step=None if is_new else step + 1)
        self._writer.add_text(
            "config", textwrap.indent(to_yaml(run.description), "    "), step
        )  # a code block
        for row, _ in read_rows(run.folder) if is_new else ():
            self.log(row.pop("step"), row)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a kill loses no row

    def log_puzzles(self, step: int, thoughts: "Thoughts") -> None:
        for name, image in thoughts.images():
            self._writer.add_image(f"{PICTURES}/{name}", image, step, dataformats="HWC")

    def close(self, *, has_failed: bool) -> None:
        self._writer.close()


LOGGER = TensorBoard
