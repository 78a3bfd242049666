"""Ten steps of every model in every layout that it allows are those of one process: minutes a model."""

import pytest

from tests.test_layouts import ARCHS, LAYOUTS, assert_equal_to_one


@pytest.mark.parametrize("optimizer", ["adam_atan2", "muon"])
@pytest.mark.parametrize("name", ARCHS)
def test_every_layout_is_one_process(name, optimizer, tmp_path):
    layouts = [layout for layout in LAYOUTS if not (name == "fprm" and "pp2" in layout)]
    assert_equal_to_one(tmp_path, {layout: (name, layout, {"optimizer": optimizer}) for layout in layouts})
