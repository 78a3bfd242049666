"""What `constraints.txt` pins can be installed with the oldest and the newest Python that are supported."""

from tests.matrix import COMBINATIONS, main


def test_pinned_versions_exist_for_the_oldest_and_the_newest_python(capsys):
    ends = [COMBINATIONS[0].name, COMBINATIONS[-1].name]
    assert main(["--resolve", "--only", *ends]) == 0, capsys.readouterr().out
