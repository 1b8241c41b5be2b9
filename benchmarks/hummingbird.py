"""The hummingbird protocol against a plain version, written from what the public toolkit does, on CamVid.

    uv run python -m benchmarks.hummingbird

Thirty images of either split, 224 pixels, a random ViT-Ti/16, no augmentation, all patches in the memory. The plain
version resizes label maps by pixel centres as ours does, and by corners as the toolkit does.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.data import LabelledImages, LabelledSubset, open_segmentation
from cribo.evaluation import DenseNN, dense_nn
from cribo.evaluation.scores import iou
from cribo.models import build_backbone
from cribo.retrieval import backbone_encoder

CAMVID = Path(__file__).parents[2] / "shared" / "data" / "camvid"
IMAGES, SIDE, PATCH, NEIGHBOURS, TEMPERATURE = 30, 224, 16, 30, 0.02
GRID = SIDE // PATCH


def plain(encode, memory: LabelledImages, queries: LabelledImages, rounding: InterpolationMode) -> float:
    """MIoU in a few lines, everything in memory; pixels without class are a class of their own."""
    classes = len(memory.classes)

    def prepared(images: LabelledImages, index: int) -> tuple[Tensor, Tensor]:
        image = TF.resize(images.load(index), [SIDE, SIDE], interpolation=InterpolationMode.BILINEAR, antialias=True)
        labels = TF.resize(images.labels(index)[None], [SIDE, SIDE], interpolation=rounding)[0].long()
        return F.normalize(encode(image[None].float() / 255)[0], dim=-1), labels

    keys, shares = [], []
    for index in range(len(memory)):
        features, labels = prepared(memory, index)
        one_hot = F.one_hot(torch.where(labels == 255, classes, labels), classes + 1).float()
        keys.append(features)
        shares.append(F.avg_pool2d(one_hot.permute(2, 0, 1)[None], PATCH)[0].flatten(1).mT)
    keys, shares = torch.cat(keys), torch.cat(shares)
    confusion = torch.zeros(classes, classes + 1, dtype=torch.long)
    for index in range(len(queries)):
        features, labels = prepared(queries, index)
        similarity, rows = (features @ keys.T).topk(NEIGHBOURS, dim=1)
        votes = ((similarity / TEMPERATURE).softmax(dim=1)[..., None] * shares[rows]).sum(dim=1)
        grid = votes.mT.unflatten(1, (GRID, GRID))[None]
        predicted = F.interpolate(grid, size=(SIDE, SIDE), mode="bilinear")[0].argmax(dim=0)
        known = labels != 255
        confusion.index_put_((labels[known], predicted[known]), torch.tensor(1), accumulate=True)
    return float(iou(confusion).nanmean())


@torch.no_grad()
def main() -> None:
    """Print the three scores."""
    if not CAMVID.is_dir():
        raise SystemExit(f"needs the CamVid data in {CAMVID}")
    opened = (open_segmentation("camvid", CAMVID, split) for split in ("train", "val"))
    memory, queries = (LabelledSubset(s, [n * len(s) // IMAGES for n in range(IMAGES)]) for s in opened)
    encoder = backbone_encoder(build_backbone("vit_tiny_patch16_224").eval())
    settings = DenseNN(protocol="hummingbird", ratios=(1,), size=(SIDE, SIDE), augmentations=0, neighbours=NEIGHBOURS)
    print(f"ours                        {dense_nn(encoder, memory, queries, settings).scores[0].miou:.6f}")
    for name, rounding in (("centres", InterpolationMode.NEAREST_EXACT), ("corners", InterpolationMode.NEAREST)):
        print(f"plain, labels by {name}    {plain(encoder.encode, memory, queries, rounding):.6f}")


if __name__ == "__main__":
    main()
