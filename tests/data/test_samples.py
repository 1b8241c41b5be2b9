from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from PIL import Image
from tests.data.batches import assert_same, assert_same_samples, view_pairs
from tests.data.faults import Noise
from torch import Tensor
from torch.utils.data import DataLoader

from cribo.base.errors import DataError
from cribo.data.loading import BatchLoader
from cribo.data.photometric import Photometric
from cribo.data.reduction import largest_reduction, reduced_crops
from cribo.data.samples import Batch, LazyImage, Sample, SampleDataset, StepBatchSampler, Unreadable
from cribo.data.sources.images import ImageFiles, open_images
from cribo.method import Crops, ViewRecipe, cut_views, sample_crops
from cribo.objectives.views import ViewPairs


def make_sampler(num_images: int, batch_size: int, *, position: int = 0, seed: int = 0, **rank: int):
    return StepBatchSampler(num_images, batch_size, seed, position=lambda: position, **rank)


def batches(workers: int, *, source: Noise, count: int = 4) -> list[Batch]:
    loader = BatchLoader(view_pairs(source), make_sampler(len(source), 4), workers=workers, pin_memory=False)
    return list(islice(loader, count))


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_do_not_depend_on_the_workers(workers: int) -> None:
    source = Noise(17, broken={2, 5, 11})
    expected = batches(0, source=source)
    torch.manual_seed(99)
    assert_same(batches(workers, source=source), expected)
    assert any(batch.unreadable for batch in expected)


def test_a_plain_data_loader_takes_the_data_set() -> None:
    source = Noise(17, broken={2, 5, 11})
    loader = DataLoader(
        view_pairs(source), batch_sampler=make_sampler(17, 4), num_workers=2, collate_fn=lambda batch: batch
    )
    assert_same(list(loader), batches(0, source=source))


def test_a_batch_contains_its_samples_in_order() -> None:
    dataset = view_pairs(Noise(20, broken={3, 4}))
    keys = [(0, 7), (0, 3), (1, 7), (0, 4), (0, 0)]
    together, alone = dataset.__getitems__(keys), [dataset[key] for key in keys]
    for ours, theirs in zip(together.split(len(keys)), alone, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert_same_samples(ours, theirs)
    assert together.unreadable == [entry for batch in alone for entry in batch.unreadable]
    assert {"noise 3", "noise 4"} <= {entry.name for entry in together.unreadable}


class Whole:
    """A source with only the three required methods."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        return self.files.load(index)

    def name(self, index: int) -> str:
        return self.files.name(index)


@pytest.fixture
def photographs(tmp_path: Path) -> ImageFiles:
    """Write four JPEGs large enough to be reduced: smooth colours with noise, two of them rotated by EXIF."""
    for index, (height, width) in enumerate(((480, 640), (331, 443), (640, 480), (1024, 768))):
        generator = torch.Generator().manual_seed(index)
        image = 1.2 * F.interpolate(
            torch.rand(1, 3, 12, 12, generator=generator), (height, width), mode="bicubic"
        ) + 0.04 * torch.randn(1, 3, height, width, generator=generator)
        exif = Image.Exif()
        exif[0x0112] = (1, 1, 6, 3)[index]
        pixels = (255 * image[0]).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{index}.jpg", quality=90, exif=exif)
    return open_images(tmp_path)


def test_reduced_images_give_nearly_the_same_views(photographs: ImageFiles) -> None:
    recipe = ViewRecipe(size=48)
    seen = set()
    for index in range(len(photographs)):
        whole = photographs.load(index)
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            crops = sample_crops(whole.shape[1], whole.shape[2], recipe, generator=generator)
            by = largest_reduction(crops, recipe.size)
            seen.add(by)
            pixels, reduction = photographs.load_reduced(index, lambda height, width, by=by: by)
            assert reduction == by
            inside = reduced_crops(crops, by)
            ours = cut_views(pixels, inside, recipe.size).float()
            theirs = cut_views(whole, Crops(inside.boxes * by, inside.flips), recipe.size).float()
            difference = (ours - theirs).abs()
            assert difference.mean() < 1.5
            assert difference.max() < 20
            # Views shifted by a single pixel differ by several times as much.
            assert difference[..., 8:-8].mean() < (ours[..., 8:-8] - theirs.roll(1, -1)[..., 8:-8]).abs().mean() / 2
    assert seen == {2, 4, 8}


def test_reduced_images_change_no_draws(photographs: ImageFiles) -> None:
    reduced, whole = view_pairs(photographs), view_pairs(Whole(photographs))
    for index in range(len(photographs)):
        ours, theirs = reduced[0, index], whole[0, index]
        assert not torch.equal(ours["views"], theirs["views"])
        # A crop loses less than one reduced pixel per side, and patch centres move by less.
        assert (ours["coordinates"] - theirs["coordinates"]).abs().max() < 8
        ours.samples |= {name: theirs[name] for name in ("views", "coordinates")}
        assert_same([ours], [theirs])


def test_coordinates_refer_to_the_full_size_image(tmp_path: Path) -> None:
    y, x = torch.meshgrid(torch.arange(768), torch.arange(1020), indexing="ij")
    ramps = torch.stack((x / 4, y / 4, torch.zeros_like(x)), dim=-1)
    Image.fromarray(ramps.to(torch.uint8).numpy()).save(tmp_path / "x.jpg", quality=98, subsampling=0)
    transform = ViewPairs(ViewRecipe(size=64), grid=(4, 4), num_objects=0, drop_path_sites=0)
    dataset = SampleDataset(open_images(tmp_path), transform, seed=0)
    for epoch in range(8):
        pair = dataset[epoch, 0]
        patches = pair["views"][0, :, :2].float().unflatten(3, (4, 16)).unflatten(2, (4, 16)).mean(dim=(3, 5))
        # A grey level spans four pixels, so truncation loses three eighths of a level on average.
        seen = 4 * (patches.flatten(2).mT + 0.375) + 0.5
        torch.testing.assert_close(pair["coordinates"][0], seen, rtol=0, atol=4.0)
        middle = (pair["coordinates"][0] - seen)[:, [5, 6, 9, 10]].mean(dim=1)
        torch.testing.assert_close(middle, torch.zeros(2, 2), rtol=0, atol=1.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_of_files_do_not_depend_on_the_workers(photographs: ImageFiles, workers: int) -> None:
    def read(workers: int) -> list[Batch]:
        loader = BatchLoader(view_pairs(photographs), make_sampler(4, 2), workers=workers, pin_memory=False)
        return list(loader)

    assert_same(read(workers), read(0))


def test_shapes_and_types() -> None:
    (batch,) = batches(0, source=Noise(8), count=1)
    assert len(batch) == 4
    assert batch["views"].shape == (4, 2, 3, 16, 16)
    assert batch["views"].dtype == torch.uint8
    assert batch["coordinates"].shape == (4, 2, 16, 2)
    assert batch["initial_tokens"].shape == (4, 5)
    assert batch["initial_tokens"].max() < 32
    assert batch["drop_path_noise"].shape == (4, 2, 3)
    assert isinstance(batch["photometric"], Photometric)
    assert batch["photometric"].order.shape == (4, 2, 4)
    assert batch["photometric"].flatten().order.shape == (8, 4)
    assert batch.unreadable == []


def test_a_pair_depends_on_seed_epoch_and_image_only() -> None:
    dataset = view_pairs(Noise(8))
    pair = dataset[3, 5]
    dataset[0, 1]
    assert_same([dataset[3, 5]], [pair])
    for other in (dataset[4, 5], view_pairs(Noise(8), seed=1)[3, 5]):
        assert not torch.equal(other["coordinates"], pair["coordinates"])
        assert not torch.equal(other["initial_tokens"], pair["initial_tokens"])
        assert not torch.equal(other["drop_path_noise"], pair["drop_path_noise"])


def test_without_objects_there_are_no_initial_tokens() -> None:
    assert view_pairs(Noise(3), num_objects=0)[0, 1]["initial_tokens"].shape == (1, 0)


def test_an_unreadable_image_is_replaced_and_reported() -> None:
    dataset = view_pairs(Noise(20, broken=range(10)))
    pair = dataset[0, 4]
    replacement = int(pair.images)
    assert replacement >= 10
    assert pair.unreadable[0] == Unreadable("noise 4", "broken on purpose")
    assert all(int(entry.name.split()[1]) < 10 for entry in pair.unreadable)
    assert_same([dataset[0, 4]], [pair])
    untouched = dataset[0, replacement]
    assert torch.equal(pair["views"], untouched["views"])  # as if the replacement had been requested
    replacements = {int(dataset[epoch, image].images) for epoch in range(6) for image in range(10)}
    assert len(replacements) > 5


def test_no_readable_image_is_an_error() -> None:
    dataset = view_pairs(Noise(3, broken=range(3)))
    with pytest.raises(DataError, match=r"noise 1: broken on purpose; none of 99 random replacements"):
        dataset[0, 1]


def test_split_returns_the_parts() -> None:
    batch = view_pairs(Noise(20, broken={3})).__getitems__([(0, image) for image in range(6)])
    batch.retried = 2
    assert batch.unreadable[0].name == "noise 3"
    for parts in (1, 2, 3, 6):
        split = batch.split(parts)
        assert [len(part) for part in split] == [6 // parts] * parts
        assert torch.equal(torch.cat([part.images for part in split]), batch.images)
        for name, whole in batch.samples.items():
            fields = [whole] if isinstance(whole, Tensor) else list(whole)
            of_parts = [[part[name]] if isinstance(whole, Tensor) else list(part[name]) for part in split]
            for field, pieces in zip(fields, zip(*of_parts, strict=True), strict=True):
                assert torch.equal(torch.cat(pieces), field), name
        # Unreadable images are reported once, with the first part.
        assert [part.unreadable for part in split] == [batch.unreadable] + (parts - 1) * [[]]
        assert [part.retried for part in split] == [2] + (parts - 1) * [0]
    with pytest.raises(ValueError, match="the batch size must be a multiple of 4 parts, got 6"):
        batch.split(4)


def test_named_tuples_stay_on_the_host_and_tensors_move() -> None:
    batch = view_pairs(Noise(3))[0, 0]
    moved = batch.to("meta")
    assert {name for name, value in moved.samples.items() if not isinstance(value, Tensor)} == {"photometric"}
    assert all(value.device.type == "meta" for value in moved.samples.values() if isinstance(value, Tensor))
    assert moved.images.device.type == "meta"
    assert {part.device.type for part in moved["photometric"]} == {"cpu"}
    assert batch["views"].device.type == "cpu"


# ------------------------------------------------------------------ custom samples


class Drawn(NamedTuple):
    """Random numbers that a transform draws for an image."""

    scale: Tensor
    order: Tensor


class Crop:
    """A transform that returns a crop of fixed size and its random numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        pixels = image.load()
        top = int(torch.randint(pixels.shape[1] - self.size + 1, (1,), generator=generator))
        drawn = Drawn(torch.rand((), generator=generator), torch.randperm(3, generator=generator))
        return {"crop": pixels[:, top : top + self.size, : self.size], "drawn": drawn}


def with_next_image(image: LazyImage, generator: torch.Generator) -> Sample:
    """Return an image and the next one of the collection."""
    return {"own": image.load(), "next": image.other(image.index + 1).load()}


def test_a_sample_reads_other_images_of_its_collection() -> None:
    source = Noise(9)
    batch = SampleDataset(source, with_next_image, seed=0)[0, 3]
    assert torch.equal(batch["own"][0], source.load(3))
    assert torch.equal(batch["next"][0], source.load(4))
    with pytest.raises(IndexError, match=r"index must be in 0\.\.8, got 9"):
        SampleDataset(source, with_next_image, seed=0)[0, 8]


def test_an_unreadable_image_of_a_sample_is_reported_by_its_own_name() -> None:
    batch = SampleDataset(Noise(9, broken={4}), with_next_image, seed=0)[0, 3]
    assert batch.unreadable[0] == Unreadable("noise 4", "broken on purpose")
    assert int(batch.images) not in (3, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_any_transform_gives_batches(workers: int) -> None:
    source = Noise(9)
    dataset = SampleDataset(source, Crop(8), seed=0)
    loader = BatchLoader(dataset, make_sampler(9, 3), workers=workers, pin_memory=False)
    batches = list(loader)
    loader.close()
    assert len(batches) == 3
    for batch in batches:
        assert batch["crop"].shape == (3, 3, 8, 8)
        assert batch["drawn"].scale.shape == (3,)
        assert batch["drawn"].order.shape == (3, 3)
        for number, index in enumerate(batch.images.tolist()):
            rows = source.load(index)[:, :, :8].unfold(1, 8, 1).permute(1, 0, 3, 2)
            assert (rows == batch["crop"][number]).flatten(1).all(1).any()
    scales = torch.cat([batch["drawn"].scale for batch in batches])
    assert len(scales.unique()) == 9


class Flat(Noise):
    """Images of a single colour, which encodes their index."""

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        return torch.full((3, 4, 4), index, dtype=torch.uint8)


class Made:
    """A transform that computes the sample `x`, or the whole sample if it is a dictionary, from the image's index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        made = self.make(int(image.load()[0, 0, 0]))
        return made if isinstance(made, dict) else {"same": torch.zeros(2), "x": made}


class Uncut:
    """A transform that returns images at their original size."""

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        return {"image": image.load()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda index: torch.zeros(3, 4 + index // 7),
            r"'x' is \(3, 5\) for noise 7 and \(3, 4\) for noise 2; fix the objective's sample transform Made",
        ),
        (
            lambda index: Drawn(torch.zeros(()), torch.zeros(2 + index // 7)),
            r"'x' is \[\(\), \(3,\)\] for noise 7 and \[\(\), \(2,\)\] for noise 2; fix",
        ),
        (
            lambda index: torch.zeros(3) if index < 7 else Drawn(torch.zeros(3), torch.zeros(3)),
            r"'x' is \[\(3,\), \(3,\)\] for noise 7 and \(3,\) for noise 2; fix",
        ),
        (
            lambda index: {"x": torch.zeros(2)} | ({"y": torch.zeros(3)} if index < 7 else {}),
            "'y' is missing for noise 7 and \\(3,\\) for noise 2; fix",
        ),
        (
            lambda index: {"x": torch.zeros(2)} | ({"y": torch.zeros(3)} if index >= 7 else {}),
            "'y' is \\(3,\\) for noise 7 and missing for noise 2; fix",
        ),
        (lambda index: 3 if index >= 7 else torch.zeros(2), "'x' is of type int for noise 7; fix"),
        (lambda index: (torch.zeros(2), torch.zeros(2)), "'x' is of type tuple for noise 2; fix"),
        (lambda index: Drawn(torch.zeros(2), None), "'x' is of type Drawn for noise 2; fix"),  # type: ignore[arg-type]
    ],
)
def test_samples_that_cannot_be_stacked_are_reported(make: Callable[[int], Any], message: str) -> None:
    dataset = SampleDataset(Flat(10), Made(make), seed=0)
    with pytest.raises(DataError, match=message):
        dataset.__getitems__([(0, 2), (0, 3), (0, 7), (0, 8)])


def test_stacking_errors_of_workers_are_raised_unchanged() -> None:
    dataset = SampleDataset(Noise(10), Uncut(), seed=0)
    loader = BatchLoader(dataset, make_sampler(10, 5), workers=1, pin_memory=False)
    with pytest.raises(DataError, match=r"^samples of one batch .* 'image' is \(3, \d+, \d+\) for noise \d") as raised:
        next(iter(loader))
    loader.close()
    assert "Traceback" not in str(raised.value)


def test_a_source_without_load_reduced_returns_full_size_images() -> None:
    asked = []

    def reduction(height: int, width: int) -> int:
        asked.append((height, width))
        return 8

    pixels, by = LazyImage(Noise(3), 1).load_reduced(reduction)
    assert by == 1
    assert torch.equal(pixels, Noise(3).load(1))
    assert asked == [tuple(pixels.shape[1:])]


# ------------------------------------------------------------------ copies and epoch order


@pytest.mark.gpu
def test_copies_from_pinned_memory_are_asynchronous() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    batch = view_pairs(Noise(3))[0, 0].pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same([moved.to("cpu")], [batch])


def test_an_epoch_visits_every_image_at_most_once() -> None:
    steps = list(make_sampler(23, 5))
    assert len(steps) == len(make_sampler(23, 5)) == 4
    visited = [image for batch in steps for _, image in batch]
    assert len(set(visited)) == len(visited) == 20
    assert set(visited) <= set(range(23))
    assert {epoch for batch in steps for epoch, _ in batch} == {0}


def test_all_images_are_visited_if_the_batch_size_divides() -> None:
    visited = [image for batch in make_sampler(20, 5) for _, image in batch]
    assert sorted(visited) == list(range(20))


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [
        [image for batch in make_sampler(20, 5, position=position, seed=seed) for _, image in batch]
        for position, seed in ((0, 0), (4, 0), (8, 0), (0, 1))
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] != list(range(20))


def test_resuming_at_any_step_continues_the_order() -> None:
    whole = [batch for epoch in range(3) for batch in make_sampler(23, 5, position=4 * epoch)]
    assert len(whole) == 12
    for position in range(12):
        rest_of_epoch = list(make_sampler(23, 5, position=position))
        end = 4 * (position // 4 + 1)
        assert rest_of_epoch == whole[position:end]


def test_the_position_is_read_at_the_start_of_an_epoch() -> None:
    step = 0
    sampler = StepBatchSampler(20, 5, 0, position=lambda: step)
    first = list(sampler)
    step = 4
    second = list(sampler)
    assert {epoch for batch in first for epoch, _ in batch} == {0}
    assert {epoch for batch in second for epoch, _ in batch} == {1}


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_each_batch(world_size: int) -> None:
    whole = list(make_sampler(31, 6, position=7))
    shares = [list(make_sampler(31, 6, position=7, rank=rank, world_size=world_size)) for rank in range(world_size)]
    for step, batch in enumerate(whole):
        assert [key for share in shares for key in share[step]] == batch


def test_fewer_images_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="the data has 7 images, fewer than one batch of 8"):
        make_sampler(7, 8)


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of the 3 processes, got 8"):
        make_sampler(20, 8, world_size=3)
