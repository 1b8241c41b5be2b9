"""`--variant hummingbird` against an independent implementation of the public toolkit's rules.

    uv run python -m benchmarks.hummingbird

Uses thirty images of each split of CamVid, 224 pixels, and a random ViT-Ti/16. Without augmentation and with all
patches in memory, both are deterministic and must agree; label maps are resized by pixel centres, as here, and by
corners, as in the toolkit. With two augmentation epochs and half of the patches, random draws differ, so means over
several seeds are compared.
"""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.transforms.v2 import ColorJitter, InterpolationMode, RandomApply, RandomResizedCrop
from torchvision.transforms.v2 import functional as TF

from cribo.data import LabelledImages, LabelledSubset, open_segmentation
from cribo.evaluation import DenseNN, dense_nn
from cribo.features import Encoder
from cribo.models import build_backbone

CAMVID = Path(__file__).parents[2] / "shared" / "data" / "camvid"
IMAGES, SIDE, PATCH, NEIGHBOURS, TEMPERATURE = 30, 224, 16, 30, 0.02
GRID = SIDE // PATCH
EPOCHS, HALF = 2, IMAGES * GRID * GRID  # half of the patches of two epochs
SEEDS = 4
CENTRES, CORNERS = InterpolationMode.NEAREST_EXACT, InterpolationMode.NEAREST
JITTER = [
    RandomApply([ColorJitter(**{change: 0.1})], p=0.5) for change in ("brightness", "contrast", "saturation", "hue")
]
CROP = RandomResizedCrop(SIDE, scale=(0.5, 2.0), ratio=(3 / 4, 4 / 3))


def plain(
    encode, memory: LabelledImages, queries: LabelledImages, rounding: InterpolationMode, epochs: int, bound: int | None
) -> float:
    """Compute the mIoU; `epochs` 0 disables augmentation, `bound` None keeps all patches."""
    classes = len(memory.classes)

    def features_and_labels(image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        image = TF.resize(image, [SIDE, SIDE], interpolation=InterpolationMode.BILINEAR, antialias=True)
        labels = TF.resize(labels[None], [SIDE, SIDE], interpolation=rounding)[0].long()
        return F.normalize(encode(image[None].float() / 255)[0], dim=-1), labels

    keys, shares = [], []
    for _ in range(max(1, epochs)):
        for index in range(len(memory)):
            image, labels = memory.load(index), memory.labels(index)
            if epochs:
                for change in JITTER:
                    image = change(image)
                crop = CROP.make_params([image])
                window = crop["top"], crop["left"], crop["height"], crop["width"]
                image, labels = TF.crop(image, *window), TF.crop(labels[None], *window)[0]
            features, labels = features_and_labels(image, labels)
            labels[labels == 255] = 0  # ignored pixels count as class 0
            share = F.avg_pool2d(F.one_hot(labels, classes).float().permute(2, 0, 1)[None], PATCH)[0].flatten(1).mT
            if bound is not None:
                present = (share > 0).float()
                score = (present * present.sum(dim=0)).sum(dim=1) * torch.rand(len(share))
                chosen = score.topk(bound // (epochs * len(memory)), largest=False).indices
                features, share = features[chosen], share[chosen]
            keys.append(features)
            shares.append(share)
    keys, shares = torch.cat(keys), torch.cat(shares)
    confusion = torch.zeros(classes, classes)
    for index in range(len(queries)):
        features, labels = features_and_labels(queries.load(index), queries.labels(index))
        similarity, rows = (features @ keys.T).topk(NEIGHBOURS, dim=1)
        votes = ((similarity / TEMPERATURE).softmax(dim=1)[..., None] * shares[rows]).sum(dim=1)
        grid = votes.mT.unflatten(1, (GRID, GRID))[None]
        predicted = F.interpolate(grid, size=(SIDE, SIDE), mode="bilinear")[0].argmax(dim=0)
        known = labels != 255
        confusion.index_put_((labels[known], predicted[known]), torch.tensor(1.0), accumulate=True)
    iou = confusion / (confusion.sum(dim=1, keepdim=True) + confusion.sum(dim=0) - confusion).clamp(min=1)
    matched = iou[linear_sum_assignment(iou, maximize=True)]
    return float(matched.sum() / classes)  # a class that does not occur counts as 0


@torch.no_grad()
def main() -> None:
    """Print the scores."""
    if not CAMVID.is_dir():
        raise SystemExit(f"the CamVid data are required in {CAMVID}")
    opened = (open_segmentation("camvid", CAMVID, split) for split in ("train", "val"))
    memory, queries = (LabelledSubset(s, [n * len(s) // IMAGES for n in range(IMAGES)]) for s in opened)
    encoder = Encoder(build_backbone("vit_tiny_patch16_224").eval())

    def ours(**settings: Any) -> float:
        chosen = DenseNN(variant="hummingbird", ratios=(1,), size=(SIDE, SIDE), **settings)
        return dense_nn(encoder, memory, queries, chosen).rows[0]["miou"]

    print("no augmentation, all patches")
    print(f"  --variant hummingbird       {ours(augmentations=0):.6f}")
    for name, rounding in (("centres", CENTRES), ("corners", CORNERS)):
        print(f"  plain, labels by {name}    {plain(encoder.tokens, memory, queries, rounding, 0, None):.6f}")
    print(f"two epochs of augmentation, half of the patches; mean and deviation of {SEEDS} seeds")
    scores = {"--variant hummingbird": [], "plain, labels by corners": []}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        scores["--variant hummingbird"].append(ours(seed=seed, memory_patches=HALF))
        scores["plain, labels by corners"].append(plain(encoder.tokens, memory, queries, CORNERS, EPOCHS, HALF))
    for name, values in scores.items():
        print(f"  {name:26}  {fmean(values):.4f} ± {stdev(values):.4f}")


if __name__ == "__main__":
    main()
