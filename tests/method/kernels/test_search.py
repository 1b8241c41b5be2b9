"""The fused first pass of the bank's search: by Triton's interpreter on the CPU, and compiled without a GPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

SIZES = [(1, 64, 8, 64), (130, 320, 72, 64), (33, 96, 24, 32)]
"""Queries, rows, channels, rows of a tile."""


def interpreted() -> None:
    """Every configuration on odd sizes against the plain version; runs in a process of its own."""
    from cribo.method.kernels import search as kernels
    from cribo.method.search import plain_tile_maxima

    generator = torch.Generator().manual_seed(0)
    configs = list(kernels.CONFIGS)
    for config in configs:
        kernels.CONFIGS[:] = [config]  # one is not timed, for which there would have to be a GPU
        kernels._tuned.cache_clear()
        for count, length, dim, tile in SIZES:
            queries = F.normalize(torch.randn(count, dim, generator=generator), dim=-1).half()
            rows = 3 * torch.randn(length, dim, generator=generator)
            given = (queries, rows.half(), 1 / rows.norm(dim=-1), torch.arange(count) // 4, torch.arange(length) // 70)
            found, expected = (torch.zeros(length // tile, count) for _ in range(2))
            kernels.tile_maxima(*given, found)
            plain_tile_maxima(*given, expected)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert expected.isinf().any()


def compiled() -> None:
    """Prints what each configuration takes of a Hopper GPU; runs in a process of its own."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cribo.method.kernels.search import CONFIGS, tile_maxima_kernel

    signature = dict.fromkeys(tile_maxima_kernel.arg_names, "constexpr")
    signature |= {"queries": "*fp16", "rows": "*fp16", "scales": "*fp32", "images": "*i64", "row_images": "*i64"}
    signature |= {"maxima": "*fp32", "num_queries": "i32", "num_rows": "i32"}
    divisible = {(place,): [["tt.divisibility", 16]] for place in (*range(6), 7)}
    usage = []
    for config in CONFIGS:
        source = ASTSource(tile_maxima_kernel, signature, {"dim": 384, "tile_size": 64, **config.kwargs}, divisible)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        usage.append(
            {
                "shared": kernel.metadata.shared,
                "tensor cores": "wgmma.mma_async" in kernel.asm["ptx"],
                "binary": _resources(kernel.asm["cubin"]),
            }
        )
    sys.stdout.write(json.dumps(usage))


def _resources(binary: bytes) -> str:
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def in_another_process(function: str, **variables: str) -> str:
    """What a function of this module prints where Triton is imported anew, and nothing checks its kernels' shapes."""
    command = [sys.executable, "-c", f"import test_search; test_search.{function}()"]
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_interpreted_against_the_plain_version() -> None:
    in_another_process("interpreted", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_compiled_for_hopper_without_spills() -> None:
    for usage in json.loads(in_another_process("compiled")):
        assert usage["tensor cores"]
        assert usage["shared"] <= 227 * 1024
        assert re.search(r"STACK:0\b.*LOCAL:0\b", usage["binary"]), usage["binary"]


def test_wrong_types_and_gaps() -> None:
    from cribo.method.kernels.search import tile_maxima

    rows, images = torch.zeros(64, 8), torch.zeros(64, dtype=torch.long)
    with pytest.raises(ValueError, match=r"must both be float16 or bfloat16, got torch.float32 and torch.float32"):
        tile_maxima(rows[:3], rows, rows[:, 0], images[:3], images, torch.zeros(1, 3))
    half = torch.zeros(128, 8).half()[::2]
    with pytest.raises(ValueError, match=r"all tensors must be contiguous: call .contiguous\(\) first"):
        tile_maxima(half[:3], half, rows[:, 0].contiguous(), images[:3], images, torch.zeros(1, 3))
