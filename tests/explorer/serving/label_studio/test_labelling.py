"""Labelling configurations: tags, labels, and the image of a task."""

import pytest
from tests.explorer.serving.label_studio.conftest import config

from cribo.base.errors import DataError
from cribo.explorer.serving.label_studio.labelling import differences, read_labelling

TWO = """
<View>
  <Header value="$title"/>
  <Image name="before" value="$first"/>
  <View style="display: flex">
    <Image name="after" value="$second" zoom="true"/>
    <RectangleLabels name="box" toName="after,before">
      <Label value="car"/><Label value="Road" alias="road"/>
    </RectangleLabels>
    <BrushLabels name="brush" toName="after"><Label value="car"/></BrushLabels>
    <PolygonLabels name="text" toName="title"><Label value="word"/></PolygonLabels>
  </View>
  <PolygonLabels name="other" toName="before"><Label value="sky"/></PolygonLabels>
</View>
"""


def test_the_most_precise_tag_of_each_label() -> None:
    found = read_labelling(TWO)
    assert (found.image, found.field) == ("after", "second")
    assert {label: control.name for label, control in found.controls.items()} == {"car": "brush", "road": "box"}
    regions = [{"to_name": "before"}, {"to_name": "after"}, {"type": "choices"}]
    assert found.own({"id": 1, "result": regions}) == {"id": 1, "result": regions[1:]}


def test_tags_are_named_without_regard_to_case() -> None:
    found = read_labelling(config("brushlabels").lower())
    assert {label: control.type for label, control in found.controls.items()} == {"right": "brushlabels"}


@pytest.mark.parametrize("data", [None, 5, {}, {"image": 5}, {"image": ""}, {"other": "/a.png"}])
def test_a_task_without_an_image(data: object) -> None:
    with pytest.raises(DataError, match="'image'"):
        read_labelling(config("brushlabels")).address(data)


def test_differences_of_labels_and_classes() -> None:
    classes = ["_background_", "car", "road", "Road"]
    assert differences(["CAR", "road", "sky", "Background", "ignore"], classes) == (["sky"], ["Road"])
