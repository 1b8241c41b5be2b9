import json
from pathlib import Path

import pytest
import torch
from faster_coco_eval.core.coco import COCO
from faster_coco_eval.core.faster_eval_api import COCOeval_faster

from cribo.data.labelled.detection import BoxedImages, open_detection
from cribo.evaluation.detection.scoring import Detections, Gathered, average_precision, read_off, write_detections


@pytest.fixture
def images(rectangles: Path) -> BoxedImages:
    return open_detection(rectangles).val


def detections(images: BoxedImages, *, shift: float = 0.0, noise: int = 0) -> Detections:
    """Return the true boxes, shifted, and some wrong ones with lower scores."""
    generator = torch.Generator().manual_seed(0)
    most = images.most_boxes + noise
    corners = 40 * torch.rand(len(images), most, 4, generator=generator)
    corners[..., 2:] = corners[..., :2] + 10
    labels = torch.randint(2, (len(images), most), generator=generator)
    scores = 0.2 * torch.rand(len(images), most, generator=generator)
    for index in range(len(images)):
        boxes = images.boxes(index)
        corners[index, : len(boxes)] = boxes.corners.float() + shift
        labels[index, : len(boxes)] = boxes.labels
        scores[index, : len(boxes)] = 0.9
    return Detections(torch.arange(len(images)), corners, labels, scores)


def test_true_boxes_are_perfect_and_shifted_ones_are_not(images: BoxedImages) -> None:
    perfect = average_precision(images, detections(images))
    assert perfect["ap"] == perfect["ap50"] == pytest.approx(1.0)
    assert perfect["per_class"] == {"red": pytest.approx(1.0), "green": pytest.approx(1.0)}
    assert perfect["by_size"]["large"] is None  # no objects of this size
    shifted = average_precision(images, detections(images, shift=3.0))
    assert shifted["ap75"] < shifted["ap50"] <= 1.0


def test_score_equals_that_of_the_written_file(images: BoxedImages, tmp_path: Path) -> None:
    found = detections(images, shift=1.5, noise=6)
    path = write_detections(tmp_path / "found.json", images, found)
    rows = json.loads(path.read_text())
    assert {row["category_id"] for row in rows} == {7, 90}
    assert {row["image_id"] for row in rows} == {100, 101, 102, 103}
    assert len(rows) == found.scores.numel()
    content = json.loads(images.file.read_text())
    for annotation in content["annotations"]:
        annotation |= {"area": annotation["bbox"][2] * annotation["bbox"][3], "iscrowd": 0}
    truth = COCO(content)
    evaluation = COCOeval_faster(truth, truth.loadRes(rows), "bbox")
    evaluation.run()
    precision = average_precision(images, found)
    ours = [precision[name] for name in ("ap", "ap50", "ap75")]
    assert [*ours, *precision["by_size"].values()] == [
        pytest.approx(value, abs=1e-6) if value >= 0 else None for value in evaluation.stats[:6]
    ]
    assert 0.1 < precision["ap"] < 0.9


def test_detections_in_crowds_are_ignored(images: BoxedImages) -> None:
    content = json.loads(images.file.read_text())
    content["annotations"].append({"image_id": 102, "category_id": 7, "bbox": [0, 0, 64, 48], "iscrowd": 1})
    images.file.write_text(json.dumps(content))
    with_crowd = BoxedImages(images.file, images.file.parent / "images" / "val")
    found = detections(images, noise=3)
    found.scores[2], found.labels[2] = 0.95, 0  # the highest score, in the image without objects
    without = average_precision(images, found)["per_class"]["red"]
    assert without is not None
    assert without < 0.7
    assert average_precision(with_crowd, found)["per_class"]["red"] == pytest.approx(1.0)


def test_absent_classes_have_no_precision(images: BoxedImages) -> None:
    part = images.subset([1])
    found = detections(images)
    one = Detections(torch.arange(1), found.corners[1:2], found.labels[1:2], found.scores[1:2])
    assert average_precision(part, one)["per_class"] == {"red": None, "green": pytest.approx(1.0)}


def test_each_image_must_be_scored_once(images: BoxedImages) -> None:
    found = detections(images)
    twice = Detections(torch.tensor([0, 1, 1, 3]), found.corners, found.labels, found.scores)
    with pytest.raises(ValueError, match="each of the 4 images must have detections exactly once"):
        average_precision(images, twice)


def test_detections_are_gathered_in_image_order(images: BoxedImages) -> None:
    found = detections(images)
    gathered = Gathered()
    for place in ([3], [0, 2], [1]):
        gathered.update(*(getattr(found, name)[place] for name in ("indices", "corners", "labels", "scores")))
    for name, value in zip(("indices", "corners", "labels", "scores"), gathered.compute(), strict=True):
        assert torch.equal(value, getattr(found, name))


def test_boxes_and_classes_are_decoded() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0, 5.0], [3.0, 0.0, 0.0, 0.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.5, 1.0], [0.25, 0.75, 0.1, 0.2]]])
    corners, labels, scores = read_off(logits, boxes, torch.tensor([[100.0, 200.0]]))  # height, width
    assert labels.tolist() == [[1, 0]]
    torch.testing.assert_close(scores[0, 0], logits[0, 0].softmax(0)[1])
    torch.testing.assert_close(corners[0], torch.tensor([[50.0, 0, 150, 100], [40, 65, 60, 85]]))
