"""Agreement of CUDA and CPU results, and a short run on a GPU."""

import warnings
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from rich.console import Console

import cribo
from cribo.cli.doctor import examine
from cribo.data import Photometric, apply_photometric, sample_photometric
from cribo.data.loading import BatchLoader
from cribo.data.photometric import compile_photometric
from cribo.data.samples import SampleDataset, StepBatchSampler
from cribo.data.scenes import Scenes
from cribo.evaluation import DenseNN, dense_nn
from cribo.evaluation.dense_neighbours.config import Variant
from cribo.features import Encoder, Machine, nearest
from cribo.features.config import Head
from cribo.features.memory import Example, SegmentationMemory, SegmentationSettings
from cribo.features.search import TensorKeys
from cribo.method import MemoryBank, SelfDistillation, cluster_tokens, cross_view_loss, match_objects, pool_objects
from cribo.method.config import ViewRecipe
from cribo.models import build_backbone
from cribo.objectives.views import view_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_clustering_and_pooling_agree_with_the_cpu():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, 392, 64, generator=generator)
    coordinates = torch.rand(4, 392, 2, generator=generator) * 224
    start = torch.stack([torch.randperm(392, generator=generator)[:32] for _ in range(4)])
    arguments = {"num_objects": 32, "position_weight": 1.0}
    expected = cluster_tokens(tokens, coordinates, initial_tokens=start, **arguments)
    found = cluster_tokens(tokens.cuda(), coordinates.cuda(), initial_tokens=start.cuda(), **arguments)
    assert (found.cpu() == expected).float().mean() >= 0.999
    objects, kept = pool_objects(tokens.view(4, 2, 196, 64).cuda(), expected.view(4, 2, 196).cuda(), 32)
    on_cpu, kept_on_cpu = pool_objects(tokens.view(4, 2, 196, 64), expected.view(4, 2, 196), 32)
    torch.testing.assert_close(objects.cpu(), on_cpu, rtol=1e-4, atol=1e-5)
    assert (kept.cpu() == kept_on_cpu).all()


def test_matching_agrees_with_the_cpu_from_a_half_precision_bank():
    generator = torch.Generator().manual_seed(0)
    objects, rows = torch.randn(2, 40, 64, generator=generator), torch.randn(2, 500, 64, generator=generator)
    bank = MemoryBank(num_images=500, num_objects=1, dim=64, dtype=torch.float16, device="cuda")
    bank.push(rows.cuda(), torch.arange(500).cuda() + 1000, counts=[1] * 500)
    found = bank.match(objects.cuda(), torch.arange(40).cuda())
    nearest, consistent = match_objects(objects, rows.half().float())
    assert (found.nearest.cpu() == nearest).all()
    assert (found.valid.cpu() == consistent).all()


@pytest.mark.parametrize("mixed", [False, True])
def test_losses_and_gradients_agree_with_the_cpu(mixed: bool):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 25, 16), (2, 25, 16), (96, 16)
    student, teacher, weight = (F.normalize(torch.randn(shape, generator=generator), dim=-1) for shape in shapes)
    results = []
    for device in ("cpu", "cuda"):
        rows = student.clone().to(device).requires_grad_()
        prototypes = weight.clone().to(device).requires_grad_()
        level = SelfDistillation(prototypes, weight.to(device), torch.zeros(96, device=device), 0.1, 0.04)
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = cross_view_loss(rows, teacher.to(device), level)
        loss.backward()
        assert rows.grad is not None
        assert prototypes.grad is not None
        results.append([value.detach().cpu() for value in (loss, rows.grad, prototypes.grad)])
    rtol, atol = (1e-2, 1e-3) if mixed else (1e-4, 1e-5)  # under autocast, products are in TF32 on the GPU
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_photometric_operations_agree_with_the_cpu():
    recipe, generator = ViewRecipe(size=48), torch.Generator().manual_seed(0)
    photometric = sample_photometric(recipe, generator=generator)
    views = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8, generator=generator)
    expected = apply_photometric(views, photometric)
    found = apply_photometric(views.cuda(), photometric)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=2e-2)


@pytest.mark.usefixtures("unchecked_shapes")  # PyTorch 2.11 does not compile the checks of shapes
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32-true"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_short_run(tmp_path: Path, precision: str, compiled: bool):
    run = cribo.pretrain(
        "quickstart",
        out=tmp_path,
        overrides={
            "data.scenes.count": 64,
            "optim.batch_size": 32,
            "objects.group_size": 16,
            "optim.clip": 0.3,
            "optim.epochs": 2,
            "score.root": None,
            "runtime.accelerator": "gpu",
            "runtime.precision": precision,
            "runtime.compile": compiled,
            "runtime.log_every": 1,
        },
    )
    assert run.summary["steps"] == 4
    assert all(0 < value < 20 for name, value in run.summary["losses"].items() if name != "cross_image")


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_copied_ahead_are_those_of_the_loader(workers: int):
    transform = view_pairs(ViewRecipe(size=32), build_backbone("vit_tiny_patch16_224", image_size=32), num_objects=2)
    dataset, found = SampleDataset(Scenes(40, size=48), transform, seed=0), []
    for device in (None, torch.device("cuda:0")):
        sampler = StepBatchSampler(dataset.source, 8, 0, position=lambda: 0, rank=0, world_size=1)
        with closing(BatchLoader(dataset, sampler, workers=workers, pin_memory=True, device=device)) as loader:
            found.append([batch["views"].sum(dim=(1, 2, 3, 4)).cpu() for batch in loader])
    assert len(found[0]) == 5
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))


def test_compiled_photometric_operations_agree_with_the_cpu():
    recipe, generator = ViewRecipe(size=48, solarise=(0.5, 0.5)), torch.Generator().manual_seed(0)
    photometric = Photometric.cat([sample_photometric(recipe, generator=generator) for _ in range(8)])
    views = torch.randint(0, 256, (16, 3, 48, 48), dtype=torch.uint8, generator=generator)
    expected = apply_photometric(views, photometric)
    compile_photometric()
    try:
        found = apply_photometric(views.cuda(), photometric).cpu()
    finally:
        compile_photometric(False)
    assert ((found - expected).abs() > 1 / 255).float().mean() < 5e-3  # solarised values on the threshold


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_search_agrees_with_the_cpu(precision: str):
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, precision)
    keys, queries = (F.normalize(torch.randn(n, 96, generator=generator), dim=1).to(dtype) for n in (20_000, 700))
    expected = nearest(queries, TensorKeys(keys), 30)
    found = nearest(queries, TensorKeys(keys), 30, devices=["cuda"])
    assert (found.rows == expected.rows).float().mean() > 0.999
    torch.testing.assert_close(found.similarity, expected.similarity, atol=1e-5, rtol=0)
    shared = nearest(queries, TensorKeys(keys), 30, devices=["cuda", "cuda"])
    assert (shared.rows == found.rows).float().mean() > 0.999


@pytest.mark.parametrize("variant", ["cribo", "hummingbird"])
def test_dense_retrieval_agrees_with_the_cpu(variant: Variant):
    memory, queries = Scenes(20, size=64), Scenes(10, size=64, first=20)
    scores = []
    for device in ("cpu", "cuda"):
        backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 2, "patch_size": 8}, image_size=64).to(device)
        settings = DenseNN(variant=variant, ratios=(1, 4), draws=2, size=(64, 64))
        encoder, machine = Encoder(backbone), Machine(devices=(device,))
        scores.append(dense_nn(encoder, memory, queries, settings, machine=machine).rows)
    for on_cpu, on_gpu in zip(*scores, strict=True):
        # A few patches with nearly equal votes may differ.
        assert (on_cpu["confusion"] - on_gpu["confusion"]).abs().sum() <= 0.02 * on_cpu["confusion"].sum()


@pytest.mark.parametrize("head", ["knn", "ridge", "both"])
def test_segmentation_agrees_with_the_cpu(head: Head):
    scenes, found = Scenes(8, size=64), []
    for device in ("cpu", "cuda"):
        backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 2, "patch_size": 8}, image_size=64).to(device)
        settings = SegmentationSettings(head=head, whiten=True, neighbours=5)
        memory = SegmentationMemory(backbone, classes=scenes.classes, settings=settings)
        memory.extend([Example(scenes.load(index), scenes.labels(index)) for index in range(4)])
        found.append(torch.stack([memory.segment(scenes.load(index)).labels for index in range(4, 8)]))
    assert (found[0] == found[1]).float().mean() > 0.98  # a few patches have nearly equal votes


class _Waits(Callback):
    """Records the lines of each step that wait for the device."""

    def __init__(self) -> None:
        self.places: list[list[str]] = []
        self.threads: set[int] = set()
        self._stack = ExitStack()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.threads.add(torch.get_num_threads())
        self._caught = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.cuda.set_sync_debug_mode("default")
        caught = [each for each in self._caught if "synchronizing" in str(each.message)]
        self.places.append([f"{Path(each.filename).name}:{each.lineno}" for each in caught])
        self._stack.close()


def test_a_step_synchronises_only_for_data_dependent_shapes(tmp_path: Path):
    waits, threads = _Waits(), torch.get_num_threads()
    cribo.pretrain(
        "quickstart",
        out=tmp_path,
        callbacks=[waits],
        overrides={
            "data.scenes.count": 128,
            "optim.batch_size": 32,
            "objects.group_size": 16,
            "optim.epochs": 2,
            "losses.cross_image_from_epoch": 0,
            "score.root": None,
            "runtime.accelerator": "gpu",
            "runtime.log_every": 100,
        },
    )
    # For the objects, the valid neighbours, and the bank; the last step is logged.
    assert max(map(len, waits.places[2:-1])) <= 3, "\n".join(map(" ".join, waits.places))
    assert (waits.threads, torch.get_num_threads()) == ({1}, threads)


def test_the_doctor_describes_a_gpu():
    devices = next(section for section in examine(Console(quiet=True)) if section.title == "Devices")
    assert torch.cuda.get_device_name(0) in devices.facts["cuda:0"]
    assert devices.facts["default"] == "cuda:0"
