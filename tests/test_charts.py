"""The charts of a report: texts of numbers, and labels of axes."""

import re

import pytest

from report.charts import Line, duration, line_chart, short


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (125, "2 min 5 s"), (3600, "1 h"), (90061, "1 d 1 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0.312, "0.312"), (48, "48"), (99.97, "100"), (9876, "9,876")),
        *((999_499, "999 k"), (999_500, "1 M"), (999_999_999, "1 G")),
    ],
)
def test_counts_and_rates(number, text):
    assert short(number) == text


def test_labels_of_a_narrow_axis_differ():
    line = Line("model", [1, 2, 3], [0.693, 0.705, 0.712], "series1")
    svg = line_chart("accuracy", [line], x_label="step", share=True).svg
    labels = re.findall(r">(0\.\d+)</text>", svg)
    assert len(labels) == len(set(labels)) > 2
