"""Start `cribo serve`, request the labels of an image, and stop it.

    python examples/use_server.py [MEMORY BACKBONE]

MEMORY is a file that `cribo segment --memory` has written, with its BACKBONE; by default, a memory of a few synthetic
scenes and a baseline, the mean colour of each patch, is made. Any HTTP client will do.
"""

import io
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from torchvision.transforms.v2.functional import to_pil_image

import cribo
from cribo.data.scenes import Scenes

scenes = Scenes(9)
with tempfile.TemporaryDirectory() as folder:
    file, backbone = sys.argv[1:] or (str(Path(folder) / "memory.safetensors"), "mean-colour")
    if len(sys.argv) == 1:
        memory = cribo.SegmentationMemory(backbone, classes=list(scenes.classes))
        for number in range(8):
            memory.add(scenes.load(number), scenes.labels(number), name=scenes.name(number))
        memory.save(file)

    command = [sys.executable, "-m", "cribo", "serve", "--memory", file, "--backbone", backbone, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))

    picture = io.BytesIO()
    to_pil_image(scenes.load(8)).save(picture, "PNG")
    with httpx.Client(base_url=address, timeout=60) as client:
        answer = client.post("/segment", files={"image": ("scene.png", picture.getvalue())})
        answer.raise_for_status()
    server.send_signal(signal.SIGINT)
    server.wait()

found = answer.json()
runs = found["runs"]  # label, length, label, length, ...
labels = [label for label, length in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]
assert len(labels) == found["width"] * found["height"]
for name, share in found["shares"].items():
    print(f"{name}: {share:.0%} of the pixels, confidence {found['confidence']['classes'][name]:.2f}")
