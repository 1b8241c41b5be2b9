"""Imports that keep the start of commands short."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER_UTILITIES = "torch._dynamo.utils"


def import_vision_libraries() -> None:
    """Import PyTorch, torchvision and timm, but neither PyTorch's compiler nor wandb.

    When torchvision and timm are imported, they exclude a few functions from compilation, for which PyTorch loads its
    whole compiler. timm also imports wandb if it is installed. Both together take as long as importing PyTorch. After
    this function, the compiler is loaded when a network is compiled, or when one of the excluded functions is called.
    """
    import torch

    lazily = getattr(torch, "_disable_dynamo", None)  # what PyTorch itself uses for its own functions
    if lazily is None or "torch._dynamo" in sys.modules:
        return
    eagerly, torch.compiler.disable = torch.compiler.disable, lazily
    try:
        with _replaced(_COMPILER_UTILITIES, _deferred_utilities()), _replaced("wandb", None):
            import timm  # noqa: F401
            import torchvision.transforms.v2  # noqa: F401
    finally:
        torch.compiler.disable = eagerly
    gc.freeze()  # from now on, the garbage collector skips the imported modules, also when the process ends


def _deferred_utilities() -> ModuleType:
    """Return a module whose only function, which torchvision imports, loads the compiler when it is called."""

    def real(name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        if sys.modules.get(_COMPILER_UTILITIES) is module:
            del sys.modules[_COMPILER_UTILITIES]
        return getattr(importlib.import_module(_COMPILER_UTILITIES), name)

    def is_compile_supported(device_type: str) -> bool:
        return real("is_compile_supported")(device_type)

    module = ModuleType(_COMPILER_UTILITIES)
    module.__dict__.update(is_compile_supported=is_compile_supported, __getattr__=real)
    return module


@contextmanager
def _replaced(name: str, module: ModuleType | None) -> Iterator[None]:
    """Replace a module that is not imported yet by another one, or by None, which makes its import fail."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module  # pyright: ignore[reportArgumentType] (the import system documents None)
    try:
        yield
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]
