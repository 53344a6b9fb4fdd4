"""An export takes from a vision model only the part that reads text, unless its form sees the model's images."""

from __future__ import annotations

import pytest

from compiler.frontend.seeing import ENTRY as SEE
from compiler.frontend.seeing import most_crops
from deploy.export.model import servable
from deploy.export.web import page_sees, web_model
from deploy.model_loading.known import begin
from server.interfaces import LoadError
from server.messages import Load
from tests.golden.joint import SUBJECTS as JOINT
from tests.golden.vision import SUBJECTS


@pytest.mark.parametrize("name", ["idefics3", "gemma3", "qwen2_vl", "lfm2_vl", "gemma4"])
def test_an_export_of_a_model_that_sees_only_reads_text(name: str) -> None:
    """Pages and C libraries give a step no inputs for images."""
    found = servable(begin(Load(name, str(SUBJECTS[name].folder), "f32")))
    assert found.files.config.vision is None
    assert SEE not in found.module.graph_functions
    params = {param.name for param in found.module.graph(found.mode.entry).params}
    assert not any(param.startswith("seen") or param == "axes" for param in params)


@pytest.mark.parametrize(("name", "sees"), [("idefics3", True), ("gemma3", False), ("internvl", False), ("qwen2_vl", False)])
def test_an_export_for_browsers_sees_what_the_page_can_cut(name: str, sees: bool) -> None:
    found = servable(begin(Load(name, str(SUBJECTS[name].folder), "f32")), page_sees)
    assert (SEE in found.module.graph_functions) is sees
    assert (web_model(found, name).vision is not None) is sees
    assert found.files.config.vision is None or most_crops(found.files.config.vision) == 1, "more crops at once need more memory"


@pytest.mark.parametrize("name", JOINT)
def test_a_model_that_embeds_images_is_refused_by_name(name: str) -> None:
    with pytest.raises(LoadError, match=f"{name} embeds texts and images"):
        servable(begin(Load(name, str(JOINT[name].folder), "f32")))
