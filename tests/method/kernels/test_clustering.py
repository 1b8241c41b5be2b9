"""The kernels of the clustering and of the pooling, interpreted on the CPU and compiled for a GPU that is not there.

Triton decides at its import whether it interprets, and it cannot read functions whose shapes are checked. So the cases
run in processes of their own, which two tests start: this file again, with TRITON_INTERPRET set.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cribo.method import clustering, objects

triton = pytest.importorskip("triton")
MODE = os.environ.get("TRITON_INTERPRET")
interpreted = pytest.mark.skipif(MODE != "1", reason="test_kernels starts a process for it")
compiled = pytest.mark.skipif(MODE != "0", reason="test_kernels starts a process for it")


@pytest.mark.slow
@pytest.mark.skipif(MODE is not None, reason="this is the process that was started")
@pytest.mark.parametrize(("mode", "least"), [("1", 20), ("0", 4)], ids=["interpreted", "compiled"])
def test_kernels(mode: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": mode, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= least


def batch(seed: int, batch: int, num_tokens: int, dim: int, num_objects: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens on an eighth-of-a-view grid, so that some lie on one spot, and initial tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(batch, num_tokens, dim, generator=generator)
    coordinates = 28.0 * torch.randint(8, (batch, num_tokens, 2), generator=generator)
    initial = torch.stack([torch.randperm(num_tokens, generator=generator)[:num_objects] for _ in range(batch)])
    return tokens, coordinates, initial


OPTIONS: dict[str, Any] = {
    "position_weight": 1.0,
    "marginals": "adaptive",
    "iterations": 3,
    "sinkhorn_iterations": 5,
    "sharpness": 20.0,
}


def agreement(tokens: Tensor, coordinates: Tensor, initial: Tensor, **changes: Any) -> float:
    """Share of the labels in which the kernels agree with the plain version."""
    from cribo.method.kernels.clustering import transport_labels

    options = OPTIONS | changes
    labels = transport_labels(tokens, coordinates, initial, **options)
    expected = clustering.transport_labels(tokens, coordinates, initial, **options)
    assert labels.dtype == expected.dtype
    assert labels.shape == expected.shape
    return (labels == expected).float().mean().item()


@interpreted
@pytest.mark.parametrize(
    "shape", [(2, 50, 37, 5), (1, 70, 33, 64), (1, 98, 24, 32), (1, 24, 7, 24), (1, 20, 3, 1)], ids=str
)
def test_odd_shapes(shape: tuple[int, int, int, int]) -> None:
    assert agreement(*batch(0, *shape)) >= 0.99


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        {"marginals": "uniform"},
        {"position_weight": 0.0},
        {"position_weight": 4.0, "sharpness": 5.0},
        {"iterations": 1, "sinkhorn_iterations": 1},
    ],
    ids=str,
)
def test_options(changes: dict[str, Any]) -> None:
    assert agreement(*batch(1, 2, 40, 20, 6), **changes) >= 0.99


@interpreted
def test_tokens_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from cribo.method.kernels import clustering as kernels

    monkeypatch.setattr(kernels, "_TRANSPORT_TILE", 256)  # 16 tokens at a time
    assert agreement(*batch(2, 2, 75, 20, 6)) >= 0.99


@interpreted
def test_clusters_without_tokens_and_tokens_without_position() -> None:
    tokens, coordinates, initial = batch(3, 1, 60, 3, 20)
    for places in (coordinates, torch.full_like(coordinates, 17.0)):
        assert len(clustering.transport_labels(tokens, places, initial, **OPTIONS).unique()) < 20
        assert agreement(tokens, places, initial) >= 0.99


@interpreted
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_labels_of_tokens_that_are_all_the_same_are_clusters(value: float) -> None:
    from cribo.method.kernels.clustering import transport_labels

    tokens, coordinates, initial = batch(4, 1, 20, 5, 3)
    labels = transport_labels(torch.full_like(tokens, value), coordinates, initial, **OPTIONS)
    assert ((labels >= 0) & (labels < 3)).all()


@interpreted
def test_half_precision_and_strided_tokens() -> None:
    tokens, coordinates, initial = batch(5, 2, 41, 20, 6)
    assert agreement(tokens[:, 1:].bfloat16(), coordinates[:, 1:], initial.clamp_max(39)) >= 0.99


@interpreted
def test_an_empty_batch() -> None:
    from cribo.method.kernels.clustering import transport_labels

    labels = transport_labels(torch.zeros(0, 8, 4), torch.zeros(0, 8, 2), torch.zeros(0, 2).long(), **OPTIONS)
    assert labels.shape == (0, 8)


@interpreted
def test_the_kernels_pass_the_trial_that_decides_whether_they_serve() -> None:
    from cribo.method import kernels
    from cribo.method.kernels import clustering as labelling
    from cribo.method.kernels import objects as pooling

    assert isinstance(clustering._TRANSPORT_LABELS, kernels.Accelerated)
    clustering._try(labelling.transport_labels, torch.device("cpu"))
    objects._try(pooling.sums, torch.device("cpu"))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_objects", [5, 70])
def test_sums_of_clusters(dtype: torch.dtype, num_objects: int) -> None:
    from cribo.method.kernels.objects import sums

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 2, 40, 75, generator=generator).to(dtype)[:, :, 1:]  # not contiguous
    labels = torch.randint(num_objects, (2, 2, 39), generator=generator)
    targets = torch.randperm(4 * num_objects, generator=generator).view(2, 2, num_objects).clamp_max(12)
    found, expected = sums(tokens, labels, targets, 12), objects.sums(tokens, labels, targets, 12)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert sums(tokens, labels, targets, 0).shape == (0, 75)


def resources(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: int) -> dict[str, int]:
    """What a kernel compiled for Hopper takes: registers and bytes of stack of a thread, shared memory of a program."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(pointers.values()) if kind.startswith("*")
    }
    signature = pointers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", binary], check=True, capture_output=True, text=True)
    found = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    return found | {"shared": built.metadata.shared}


def assert_fits(found: dict[str, int], warps: int = 4) -> None:
    assert found["reg"] * 32 * warps <= 65_536, found
    assert found["local"] == 0, found
    assert found["stack"] <= 32, found  # more than a few bytes are registers that did not fit
    assert found["shared"] <= 227 * 1024, found


POINTERS = dict.fromkeys(
    ("inverse_norms", "centroids", "coordinates", "cosines", "nearest", "cluster_mass", "member_coordinates"), "*fp32"
) | {"members": "*i32", "firsts": "*i32", "labels": "*i64", "targets": "*i64", "sums": "*fp32"}
NUMBERS = dict.fromkeys(("position_weight", "sharpness", "empty_cluster_size"), "fp32") | dict.fromkeys(
    ("num_rows", "image_stride", "view_stride", "token_stride"), "i32"
)


def arguments(kernel: Any, dtype: str, constants: dict[str, Any]) -> dict[str, str]:
    known = POINTERS | NUMBERS | {"tokens": f"*{dtype}"}
    return {name: known[name] for name in kernel.arg_names if name not in constants}


@compiled
@pytest.mark.parametrize(
    ("num_tokens", "dim", "num_objects", "dtype"),
    [(392, 768, 32, "fp32"), (392, 768, 32, "bf16"), (1568, 384, 64, "fp32"), (75, 33, 5, "fp32")],
)
def test_a_gpu_has_room_for_the_kernels(num_tokens: int, dim: int, num_objects: int, dtype: str) -> None:
    from cribo.method.kernels import clustering as labelling
    from cribo.method.kernels import objects as pooling

    sizes = {"num_tokens": num_tokens, "dim": dim, "num_objects": num_objects}
    tiles = labelling._Tiles(num_tokens, dim, num_objects)
    constants: dict[str, Any] = sizes | tiles.centroid
    centroid = labelling.centroid_kernel
    assert_fits(resources(centroid, arguments(centroid, dtype, constants), constants))

    constants = sizes | tiles.cost | {"positional": True}
    cost = labelling.cost_kernel
    assert_fits(resources(cost, arguments(cost, dtype, constants), constants))

    constants = {"num_tokens": num_tokens, "num_objects": num_objects, "positional": True, "adaptive": True}
    constants |= {"iterations": 5, **tiles.transport}
    transport = labelling.transport_kernel
    found = resources(transport, arguments(transport, dtype, constants), constants, num_warps=tiles.transport_warps)
    assert_fits(found, tiles.transport_warps)

    constants = {**sizes, "num_tokens": num_tokens // 2, **pooling.tiles(num_objects)}
    assert_fits(resources(pooling.sums_kernel, arguments(pooling.sums_kernel, dtype, constants), constants))
