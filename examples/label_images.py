"""Segmentation of new images from a few labelled ones, without training the network.

    python examples/label_images.py [BACKBONE]

BACKBONE is a run folder, a checkpoint or a timm name; the default is a baseline, the mean colour of each patch.
"""

import sys

import cribo
from cribo.data.scenes import Scenes

examples, new = Scenes(8), Scenes(3, first=8)
backbone = sys.argv[1] if len(sys.argv) > 1 else "mean-colour"
memory = cribo.SegmentationMemory(backbone, classes=list(examples.classes))
for number in range(len(examples)):
    memory.add(examples.load(number), examples.labels(number), name=examples.name(number))

for number in range(len(new)):
    found = memory.segment(new.load(number))  # labels and confidence of every pixel
    right = (found.labels == new.labels(number)).float().mean()
    largest = ", ".join(f"{name} {share:.0%}" for name, share in list(found.shares.items())[:3])
    print(f"{new.name(number)}: {right:.0%} of the pixels are correct; found {largest}")
