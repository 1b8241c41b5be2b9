"""ORL: its three stages, how they resume, and its samples."""

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from tests.objectives.conftest import batch_of
from tests.objectives.literal import MOMENTUM, assert_steps_are, unequal
from tests.objectives.rivals.test_byol import RESNET, SHARP
from tests.pretraining.test_spread import assert_same_checkpoint, last

import cribo.objectives.rivals.region_pairs as region_pairs
from cribo.base.errors import ConfigError, DataError, FolderError, Interrupted, UnreadableImage
from cribo.data.samples import Batch, LazyImage, SampleDataset
from cribo.data.scenes import Scenes
from cribo.data.sources.images import open_images
from cribo.method import Crops, ViewRecipe, cut_views
from cribo.models import load_backbone, normalise
from cribo.objectives import Setting, Step
from cribo.objectives.crops import augmented_crops
from cribo.objectives.rivals.byol import BYOL
from cribo.objectives.rivals.orl import ORL, RegionCrops
from cribo.objectives.rivals.region_pairs import RegionPairs
from cribo.objectives.rivals.regions import number_of_pairs
from cribo.pretraining import PretrainConfig, Run, pretrain, resume

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
ARGS: dict[str, Any] = {"neighbours": 3, "min_side": 12, "patch_size": 16, "image_epochs": 1}
PLAIN = ViewRecipe(
    size=32, area=(1.0, 1.0), aspect=(1.0, 1.0), flip=0.0, jitter=0.0, greyscale=0.0, blur=(0.0, 0.0), solarise=(0, 0)
)


def config(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> PretrainConfig:
    return tiny(
        {
            **RESNET,
            **SHARP,
            "data.scenes.count": 24,
            "optim.epochs": 2,
            "objective.name": "orl",
            "objective.args": {**ARGS, **args},
            **(changes or {}),
        }
    )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search in three parts, and draw no report."""
    monkeypatch.setattr(region_pairs, "_SMALLEST_PART", 10)
    monkeypatch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train without an interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_pairs, "_SMALLEST_PART", 10)
        patch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])
        return pretrain(config(tiny), out=tmp_path_factory.mktemp("whole"), name="whole")


def stop_at(call: int, monkeypatch: pytest.MonkeyPatch, *targets: tuple[Any, str]) -> list[Any]:
    """Send SIGTERM to this process at a call of functions; return the list of all calls."""
    calls: list[Any] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return function(*args, **kwargs)

        return run

    for owner, name in targets:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return calls


def test_a_run_has_three_stages(whole: Run) -> None:
    folder, summary = whole.folder, whole.summary
    assert summary["losses"].keys() == {"image", "region", "pair"}
    assert list(summary["stages"]) == ["image_level", "regions", "training"]
    assert all(seconds > 0 for seconds in summary["stages"].values())
    assert (folder / "image_level" / "backbone.safetensors").is_file()
    assert sorted(path.name for path in (folder / "regions").iterdir()) == ["cribo.json", "pairs.safetensors"]
    pairs = RegionPairs(**load_file(folder / "regions" / "pairs.safetensors"))
    assert len(pairs.counts) == 24
    assert pairs.counts.min() >= 1
    assert (pairs.neighbours != torch.arange(24)[:, None]).all()
    for image in range(24):
        boxes = pairs.regions(image)
        assert (boxes[:, 2:] >= 12).all()
        assert (boxes[:, :2] + boxes[:, 2:] <= 40).all()
        drawn = pairs.draw(image, generator=torch.Generator().manual_seed(image))
        assert drawn is not None
        assert drawn.neighbour in pairs.neighbours[image]
        assert any(torch.equal(drawn.other, box) for box in pairs.regions(drawn.neighbour))


def test_pairs_are_most_similar_in_the_network_of_stage_1(whole: Run, tiny: Tiny) -> None:
    """Compute the neighbours and the pairs of one image from the exported backbone."""
    folder, source = whole.folder, Scenes(24, size=40)
    pairs = RegionPairs(**load_file(folder / "regions" / "pairs.safetensors"))
    backbone = load_backbone(folder / "image_level").eval()
    state = last(folder / "image_level")["state_dict"]
    objective = ORL(Setting(config(tiny), 24, 3), **ARGS)
    objective.teacher.load_state_dict(
        {k.removeprefix("teacher."): v for k, v in state.items() if k.startswith("teacher.")}
    )

    @torch.no_grad()
    def features(image: int, boxes: torch.Tensor) -> torch.Tensor:
        crops = Crops(boxes, torch.zeros(len(boxes), dtype=torch.bool))
        views = cut_views(source.load(image), crops, 32).float() / 255
        return backbone.encode(normalise(views)).global_token

    centres = torch.cat([features(image, torch.tensor([[2, 2, 35, 35]])) for image in range(24)])
    projections = objective.teacher.projector.eval()(centres)
    cosines = F.normalize(projections, dim=1) @ F.normalize(projections, dim=1).T
    best = cosines.fill_diagonal_(-1)[5].topk(3)
    torch.testing.assert_close(cosines[5][pairs.neighbours[5]], best.values)
    own = features(5, pairs.regions(5))
    first = int(sum(number_of_pairs(int(count)) for count in pairs.counts[:5]))
    for place, neighbour in enumerate(pairs.neighbours[5].tolist()):
        other = features(neighbour, pairs.regions(neighbour))
        table = F.normalize(own, dim=1) @ F.normalize(other, dim=1).T
        row, column = pairs.pairs[first, place].tolist()
        assert table[row, column] == pytest.approx(
            float(table.max()), abs=1e-3
        )  # features were stored in half precision


@pytest.mark.parametrize("stage", ["image_level", "regions", "training"])
def test_a_run_resumes_in_every_stage(
    stage: str, tiny: Tiny, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if stage == "regions":  # in the second of three parts
            stop_at(15, patch, (region_pairs, "selective_search"))
        else:  # in the second step
            stop_at(2, patch, (BYOL if stage == "image_level" else ORL, "forward"))
        with pytest.raises(Interrupted, match=r"continue with cribo pretrain --resume .*run"):
            pretrain(config(tiny), out=tmp_path, name="run")
    folder = tmp_path / "run"
    assert (folder / "image_level" / "summary.json").is_file() == (stage != "image_level")
    assert (folder / "regions" / "pairs.safetensors").is_file() == (stage == "training")
    searched = stop_at(-1, monkeypatch, (region_pairs, "selective_search"))
    trained = stop_at(-1, monkeypatch, (BYOL, "forward"))
    again = resume(folder)
    assert len(searched) == 1 + {"image_level": 24, "regions": 14, "training": 0}[stage]  # one before stage 1
    assert len(trained) == {"image_level": 1, "regions": 0, "training": 0}[stage]
    assert_same_checkpoint(last(whole.folder)["state_dict"], last(folder)["state_dict"], 0)
    assert again.summary["stages"].keys() == whole.summary["stages"].keys()


def copy_changed(run: Path, folder: Path, name: str, before: int, now: int) -> None:
    """Copy the record and the configuration of a run, with another value of an option."""
    for file, quote in (("config.yaml", ""), ("cribo.json", '"')):
        text = (run / file).read_text()
        (folder / file).write_text(text.replace(f"{name}{quote}: {before}", f"{name}{quote}: {now}", 1))


def test_stages_of_another_network_are_rejected(tiny: Tiny, whole: Run, tmp_path: Path) -> None:
    """Files of the stages of another run: other settings, and the same settings with other weights."""
    folder = tmp_path / "run"
    shutil.copytree(whole.folder / "image_level", folder / "image_level")
    copy_changed(whole.folder, folder, "hidden_dim", 32, 48)
    with pytest.raises(FolderError, match=r"image_level was created with .* head.hidden_dim was 32, is 48\."):
        resume(folder)
    shutil.rmtree(folder)
    shutil.copytree(whole.folder / "regions", folder / "regions")
    other = config(tiny, {"seed": 1})
    copy_changed(whole.folder, folder, "seed", 0, 1)
    with pytest.raises(FolderError, match=r"regions was created with .* weights was .* Delete .*regions"):
        pretrain(other, out=tmp_path, name="run", continue_run=True)


def test_regions_that_are_too_small_are_rejected(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of 24 images has a region of at least 64 x 64 pixels: set"):
        pretrain(config(tiny, min_side=64), out=tmp_path, name="run")
    assert not list((tmp_path / "run").glob("image_level/checkpoints/*"))


def test_unreadable_images_have_no_regions_and_are_no_neighbours(tiny: Tiny, tmp_path: Path) -> None:
    scenes = Scenes(24, size=40)
    (tmp_path / "images").mkdir()
    for number in range(24):
        Image.fromarray(scenes.load(number).permute(1, 2, 0).numpy()).save(tmp_path / "images" / f"{number:02}.png")
    broken = tmp_path / "images" / "05.png"
    broken.write_bytes(broken.read_bytes()[:200])
    changes = {"data.root": str(tmp_path / "images"), "data.max_unreadable": 0.5}
    run = pretrain(config(tiny, changes), out=tmp_path, name="run")
    pairs = RegionPairs(**load_file(run.folder / "regions" / "pairs.safetensors"))
    assert pairs.counts.eq(0).nonzero().flatten().tolist() == [5]
    assert 5 not in pairs.neighbours
    assert pairs.draw(5, generator=torch.Generator()) is None
    image = LazyImage(open_images(tmp_path / "images"), 5)
    with pytest.raises(UnreadableImage, match="it could not be read when its regions were searched"):
        RegionCrops(PLAIN, pairs, patch_size=16, drop_path_sites=0)(image, torch.Generator())
    for number in range(20):
        (tmp_path / "images" / f"{number:02}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="5 neighbours require at least 6 readable images, found 4"):
        pretrain(config(tiny, {**changes, "data.max_unreadable": 1.0}, neighbours=5), out=tmp_path, name="few")


def samples_of(transform: RegionCrops) -> Batch:
    return SampleDataset(Scenes(8, size=40), transform, seed=0).__getitems__([(0, image) for image in range(8)])


def test_patches_are_a_region_its_copy_and_a_pair_with_a_neighbour() -> None:
    scenes = Scenes(8, size=40)
    boxes = torch.tensor([[2, 3, 16, 16], [20, 22, 16, 16]])  # of every image
    pairs = RegionPairs(
        boxes=boxes.repeat(8, 1),
        counts=torch.full((8,), 2),
        neighbours=torch.tensor([[(image + 1) % 8, (image + 2) % 8] for image in range(8)]),
        pairs=torch.tensor([[[1, 0], [0, 1]]]).repeat(8, 1, 1),
    )
    batch = samples_of(RegionCrops(PLAIN, pairs, patch_size=16, drop_path_sites=3))
    assert batch["global"].shape == (8, 2, 3, 32, 32)
    assert batch["drop_path_noise"].shape == (8, 6, 3)
    assert batch["photometric"].sigma.shape == (8, 6)

    def cut(image: int, box: int) -> torch.Tensor:
        top, left, height, width = boxes[box].tolist()
        return scenes.load(image)[:, top : top + height, left : left + width]

    places = set()
    for image, (region, jittered, own, other) in enumerate(batch["local"]):
        assert any(torch.equal(region, cut(image, box)) for box in (0, 1))
        assert not torch.equal(region, jittered)
        place = next(place for place in (0, 1) if torch.equal(own, cut(image, (1, 0)[place])))
        assert torch.equal(other, cut((image + 1 + place) % 8, (0, 1)[place]))
        places.add(place)
    assert places == {0, 1}


def test_without_stage_2_an_image_is_its_own_neighbour() -> None:
    recipe = dataclasses.replace(PLAIN, flip=0.5)
    batch = samples_of(RegionCrops(recipe, None, patch_size=40, drop_path_sites=0))
    scenes, mirrored = Scenes(8, size=40), 0
    for image, (region, _, own, other) in enumerate(batch["local"]):
        for patch in (region, own, other):
            flipped = torch.equal(patch, scenes.load(image).flip(-1))
            mirrored += flipped
            assert flipped or torch.equal(patch, scenes.load(image))
    assert 4 < mirrored < 20


def test_all_crops_have_the_interpolation_of_the_views() -> None:
    bicubic, bilinear = (
        samples_of(
            RegionCrops(dataclasses.replace(PLAIN, size=64, interpolation=of), None, patch_size=64, drop_path_sites=0)
        )
        for of in ("bicubic", "bilinear")
    )
    for name in ("global", "local"):
        assert (bicubic[name] != bilinear[name]).flatten(2).any(dim=2).all()


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor]:
    """Compute BYOL's loss of the two views, of a region and its copy, and of a pair of regions."""
    crops = [
        crop.double()
        for part in augmented_crops(batch, objective.options.views, objective.student.backbone)
        for crop in part.split(len(batch))
    ]
    losses = {}
    for level, pair in zip(("image", "region", "pair"), (crops[:2], crops[2:4], crops[4:]), strict=True):
        predicted, targets = (
            [network.projector(network.backbone(crop).global_token) for crop in pair]
            for network in (objective.student, objective.teacher)
        )
        predicted = [F.normalize(objective.student.predictors[level](rows), dim=1) for rows in predicted]
        targets = [F.normalize(rows.detach(), dim=1) for rows in targets]
        terms = [(predicted[own] - targets[1 - own]).square().sum(dim=1).mean() for own in (0, 1)]
        losses[level] = terms[0] + terms[1]
    return losses


@pytest.mark.parametrize("batch_norm", [False, True])
def test_two_steps_are_those_written_out(tiny: Tiny, batch_norm: bool) -> None:
    """Test a vision transformer without batch norms, and a convolutional network with them."""
    network = tiny().backbone
    changes = {} if batch_norm else {"backbone.name": network.name, "backbone.args": network.args}
    options = config(tiny, {**changes, "optim.momentum": MOMENTUM})
    objective = unequal(ORL(Setting(options, 24, 3), **{**ARGS, "batch_norm": batch_norm}))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]

    assert_steps_are(objective, batches, written_losses, tolerance=1e-6)


def test_every_loss_has_its_own_predictor_and_crops(tiny: Tiny) -> None:
    objective = ORL(Setting(config(tiny), 24, 3), **ARGS)
    batch = batch_of(objective)
    losses = objective(batch, STEP).losses
    assert losses.keys() == {"image", "region", "pair"}
    changes = {"image": ("global", 0), "region": ("local", 1), "pair": ("local", 3)}
    for name, (of, crop) in changes.items():
        gradients = torch.autograd.grad(
            losses[name], [*objective.student.predictors.parameters()], retain_graph=True, materialize_grads=True
        )
        trained = {
            key.partition(".")[0]
            for (key, _), gradient in zip(objective.student.predictors.named_parameters(), gradients, strict=True)
            if gradient.any()
        }
        assert trained == {name}
        changed = dataclasses.replace(batch, samples={**batch.samples, of: batch[of].clone()})
        changed[of][:, crop] = 255 - changed[of][:, crop]
        fresh = ORL(Setting(config(tiny), 24, 3), **ARGS)(changed, STEP).losses
        assert fresh[name] != losses[name]
