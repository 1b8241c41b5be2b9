"""Commands that need an optional package say so before they open a backbone or read an image."""

import sys
from pathlib import Path

import pytest

from cribo.base.packages import install_command
from cribo.cli import main

NETWORK = ("--backbone", "no-such-file.pth")
NOWHERE = ("--images", "nowhere")


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (("export", *NETWORK, "--to", "onnx"), "onnxscript", "export"),
        (("export", *NETWORK, "--to", "transformers"), "transformers", "export"),
        (("index", *NETWORK, *NOWHERE, "--db", "new.db"), "lance", "search"),
        (("explore", *NETWORK, *NOWHERE, "--port", "0"), "gradio", "explore"),
        (("explore", *NETWORK, *NOWHERE, "--port", "0"), "lance", "explore"),
        (("serve", *NETWORK, "--memory", "nowhere", "--port", "0"), "uvicorn", "explore"),
        (("embed", "nowhere", *NETWORK, "--format", "lance", "--out", "out"), "lance", "search"),
        (("embed", "nowhere", *NETWORK, "--engine", "ray", "--out", "out"), "ray", "cluster"),
        (("evaluate", "dense-nn", *NETWORK, "--data", "camvid", "--search", "faiss"), "faiss", "search"),
        (("evaluate", "overclustering", *NETWORK, "--data", "camvid"), "faiss", "evaluation"),
        (("evaluate", "detection", *NETWORK, "--data", "nowhere"), "transformers", "detection"),
        (("pretrain", "--data.root", "nowhere", "--backbone.lora", "8"), "peft", "lora"),
        (("pretrain", "--data.root", "nowhere", "--objective.name", "orl"), "cv2", "regions"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else value,
)
def test_a_missing_package_is_reported_before_anything_is_opened(
    words: tuple[str, ...],
    package: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(list(words)) == 2
    assert install_command(extra) in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
