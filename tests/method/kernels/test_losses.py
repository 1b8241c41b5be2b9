"""The fused prototype loss: by Triton's interpreter against the plain version, and compiled without a GPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


def interpreted() -> None:
    """The trial of a new device, and harder inputs; runs in a process of its own."""
    from cribo.method.kernels.losses import differences
    from cribo.method.losses import _try, differences_plain

    _try(differences, torch.device("cpu"))
    # Rows longer than a program's part, three targets of a row, logits of thousands, a single pair.
    generator = torch.Generator().manual_seed(1)
    for rows, scale, columns in (([0, 1, 1, 1], 1.0, 4097), ([0, 1], 3000.0, 9000), ([0], 1.0, 5)):
        logits = scale * torch.randn(rows[-1] + 1, columns, generator=generator)
        targets = scale * torch.randn(len(rows), columns, generator=generator)
        centres = torch.randn(1, columns, generator=generator)
        weights = torch.rand(len(rows), generator=generator)
        results = []
        for version in (differences, differences_plain):
            gradient = logits.clone()
            values = version(gradient, targets.clone(), torch.tensor(rows), weights, centres, None)
            results.append((values, gradient))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def compiled() -> None:
    """Prints what each kernel takes of a Hopper GPU; runs in a process of its own."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cribo.method.kernels import losses

    usage = []
    for has_groups in (False, True):
        for kernel, given in (
            (losses.normalisers_kernel, {"has_centres": True, "has_groups": has_groups}),
            (losses.normalisers_kernel, {"has_centres": False, "has_groups": has_groups}),
            (losses.differences_kernel, {"has_groups": has_groups}),
        ):
            function: Any = kernel
            constants = {**given, "columns": losses.COLUMNS}
            signature = dict.fromkeys(function.arg_names, "*fp32") | {"groups": "*i64", "num_columns": "i32"}
            signature |= {"offsets": "*i64"} if "offsets" in function.arg_names else {}
            signature |= dict.fromkeys(constants, "constexpr")
            source = ASTSource(function, signature, constexprs=constants)
            binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": losses.WARPS})
            usage.append({"shared": binary.metadata.shared, "binary": _resources(binary.asm["cubin"])})
    sys.stdout.write(json.dumps(usage))


def _resources(binary: bytes) -> str:
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def apart(function: str, interpret: str) -> str:
    """Output of one of the functions above: Triton decides at its import whether it interprets."""
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_losses as t; t.{function}()"
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_interpreted_kernels_agree_with_the_plain_version() -> None:
    apart("interpreted", "1")


def test_the_kernels_compile_for_hopper_without_spilling() -> None:
    for kernel in json.loads(apart("compiled", "0")):
        found = re.search(r"REG:(\d+) STACK:(\d+)", kernel["binary"])
        assert found
        registers, stack = int(found[1]), int(found[2])
        assert stack == 0  # nothing spilled
        assert registers <= 64  # four programs of 256 threads on a multiprocessor at least
        assert kernel["shared"] <= 48 * 1024
