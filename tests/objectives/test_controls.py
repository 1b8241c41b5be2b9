"""Controls of CrIBo: labels in place of clusters and criterion, and random pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError
from cribo.data import open_images
from cribo.data.samples import Batch, SampleDataset
from cribo.data.scenes import Scenes
from cribo.objectives import Setting, Step
from cribo.objectives.controls import ClassifiedObjects, RandomPairsCrIBo, SupervisedCrIBo
from cribo.objectives.cribo import CrIBo
from cribo.pretraining import PretrainConfig

Tiny = Callable[..., PretrainConfig]
STEP = Step(3, steps_per_epoch=2, total_steps=12)


def make(tiny: Tiny, kind: type[CrIBo], **args: Any) -> CrIBo:
    return kind(
        Setting(tiny({"backbone.drop_path": 0.0, "objects.num_objects": 10, "objects.group_size": 2}), 36, 4), **args
    )


def batches(objective: CrIBo, number: int) -> list[Batch]:
    dataset = SampleDataset(Scenes(36, size=40), objective.samples(), seed=0)
    return [dataset.__getitems__([(0, 4 * part + image) for image in range(4)]) for part in range(number)]


def trained_on(objective: CrIBo, number: int) -> CrIBo:
    for batch in batches(objective, number):
        objective(batch, STEP)
        objective.after_step(STEP)
    return objective


def test_clusters_are_the_classes_at_the_centres_of_patches(tiny: Tiny) -> None:
    objective = trained_on(make(tiny, SupervisedCrIBo, matches=False), 1)
    [batch] = batches(objective, 1)
    result = objective.last_result
    assert result is not None
    assert result.objects is not None
    classes, labels = batch["classes"], result.objects.labels
    for own, found in zip(classes.flatten(1), labels.flatten(1), strict=True):
        pairs = {(int(a), int(b)) for a, b in zip(own, found, strict=True)}
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    scene = Scenes(36, size=40).labels(0)
    x, y = batch["coordinates"][0, 1, 2].long()
    assert classes[0, 1, 2] == scene[y, x]


def test_valid_matches_have_the_same_class(tiny: Tiny) -> None:
    objective = trained_on(make(tiny, SupervisedCrIBo, clusters=False), 6)
    assert isinstance(objective, SupervisedCrIBo)
    result, bank = objective.last_result, objective.class_bank.bank
    assert result is not None
    assert result.matches is not None
    assert bank is not None
    assert objective.bank is not None
    nearest, valid = result.matches.nearest, result.matches.valid
    assert valid.any()
    assert not valid.all()
    assert isinstance(result.objects, ClassifiedObjects)
    scenes = Scenes(36, size=40)
    for view, row in valid.nonzero().tolist():
        [image] = bank.image_ids(nearest[view, row, None])
        assert [image] == objective.bank.image_ids(nearest[view, row, None]).tolist()
        classes = result.objects.classes[view, row].nonzero()[:, 0].tolist()
        assert classes
        assert set(classes) <= set(scenes.labels(int(image)).unique().tolist())


def test_a_state_is_restored_with_its_classes(tiny: Tiny) -> None:
    objective = trained_on(make(tiny, SupervisedCrIBo), 3)
    again = make(tiny, SupervisedCrIBo)
    again.load_state_dict(objective.state_dict())
    [*_, batch] = batches(objective, 4)
    for one in (objective, again):
        one(batch, STEP)
    first, second = objective.last_result, again.last_result
    assert first is not None
    assert second is not None
    assert first.matches is not None
    assert second.matches is not None
    assert torch.equal(first.matches.valid, second.matches.valid)


def test_random_pairs_are_all_valid_and_repeatable(tiny: Tiny) -> None:
    results = [trained_on(make(tiny, kind), 4).last_result for kind in (RandomPairsCrIBo, RandomPairsCrIBo, CrIBo)]
    random, again, nearest = (result.matches for result in results if result is not None)
    assert random is not None
    assert again is not None
    assert nearest is not None
    assert random.valid.all()
    assert torch.equal(random.nearest, again.nearest)
    assert (random.nearest != nearest.nearest).float().mean() > 0.5


def test_random_pairs_do_not_depend_on_micro_batches_and_leave_out_the_own_image(tiny: Tiny) -> None:
    [*pushed, batch] = batches(make(tiny, RandomPairsCrIBo), 3)
    found = []
    for parts in (1, 2):
        objective = make(tiny, RandomPairsCrIBo)
        for one in (*pushed, batch):  # the images of the last batch are in the bank
            objective(one, STEP)
            objective.after_step(STEP)
        results = []
        for part in batch.split(parts):
            objective(part, STEP)
            results.append(objective.last_result)
        found.append(torch.cat([result.matches.nearest for result in results if result and result.matches], dim=1))
        images = torch.cat([result.objects.images for result in results if result and result.objects])
        assert objective.bank is not None
        assert (objective.bank.image_ids(found[-1][0]) != images).all()
    assert torch.equal(*found)


def test_labels_are_read_from_a_folder(tiny: Tiny, tmp_path: Path) -> None:
    scenes = Scenes(8, size=40)
    for kind in ("images", "labels"):
        (tmp_path / kind).mkdir()
    for index in range(8):
        Image.fromarray(scenes.load(index).permute(1, 2, 0).numpy()).save(tmp_path / "images" / f"{index}.png")
        Image.fromarray(scenes.labels(index).numpy()).save(tmp_path / "labels" / f"{index}.png")
    objective = make(tiny, SupervisedCrIBo, labels=str(tmp_path / "labels"))
    dataset = SampleDataset(open_images(tmp_path / "images"), objective.samples(), seed=0)
    of_scenes = SampleDataset(scenes, make(tiny, SupervisedCrIBo).samples(), seed=0)
    assert torch.equal(dataset[0, 3]["classes"], of_scenes[0, 3]["classes"])
    Image.fromarray(scenes.labels(3).numpy()[:, :30]).save(tmp_path / "labels" / "3.png")
    with pytest.raises(DataError, match=r"the labels of 3\.png have 30 x 40 pixels, but the image 40 x 40"):
        dataset[0, 3]
    (tmp_path / "labels" / "3.png").unlink()
    with pytest.raises(DataError, match=r"3\.png does not exist: objective\.args\.labels must have a label map"):
        dataset[0, 3]
    with pytest.raises(DataError, match="has no labels: use synthetic scenes, or name their folder"):
        SampleDataset(open_images(tmp_path / "images"), make(tiny, SupervisedCrIBo).samples(), seed=0)[0, 1]
