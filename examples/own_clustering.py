"""CrIBo with a custom clustering and a custom matching criterion.

    python examples/own_clustering.py

Configurations and the command line refer to them by import path:

    cd examples && cribo pretrain --objects.clustering own_clustering.stripes \\
        --objects.criterion own_clustering.close_enough

They are used in training, in the report, and in `cribo explore` and `cribo figures`.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

import cribo


def stripes(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    *,
    num_objects: int,
    initial_tokens: Int[Tensor, "b k"],
) -> Int[Tensor, "b t"]:
    """Cluster tokens into vertical stripes of the image: a label in [0, K) for each of the T = 2N tokens."""
    x = coordinates[..., 0]
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    return ((x - low) / (high - low + 1) * num_objects).long()


def close_enough(objects: Float[Tensor, "2 r d"], jumped: Float[Tensor, "2 r d"]) -> Bool[Tensor, "2 r"]:
    """Accept matches that are also similar in the other view; compare `cribo.method.cycle_consistency`."""
    return F.cosine_similarity(objects.flip(0), jumped, dim=-1) > 0.5


if __name__ == "__main__":
    torch.set_num_threads(2)
    run = cribo.pretrain(
        "quickstart",
        out=sys.argv[1] if len(sys.argv) > 1 else "runs",
        default_name="own-clustering",
        overrides={
            "objects.clustering": f"{Path(__file__).stem}.stripes",
            "objects.criterion": f"{Path(__file__).stem}.close_enough",
            "losses.cross_image_from_epoch": 0,
            "data.scenes.count": 128,
            "data.workers": 0,
            "optim.epochs": 3,
            "score.root": None,
        },
    )
    print(run.folder, run.summary["shown"])
