"""Dense retrieval with a custom model on custom images.

    python examples/evaluate_own_model.py

Any function that maps images to patch features can be evaluated, on any collection of labelled images.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.data.scenes import Scenes
from cribo.evaluation import DenseNN, dense_nn
from cribo.features import Encoder, mean_colour_encoder

PATCH = 8
network = nn.Sequential(nn.Conv2d(3, 64, PATCH, PATCH), nn.GELU()).requires_grad_(False)


def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
    """Map images in 0-1 to one feature per patch, row by row from the top left."""
    return network(images).flatten(2).transpose(1, 2)


# Labelled images implement __len__, load(index) -> (3, h, w), labels(index) -> (h, w), name(index) and classes.
memory, queries = Scenes(60), Scenes(20, first=60)
settings = DenseNN(ratios=(1, 8), neighbours=20)
encoders = {"random convolution": Encoder.from_function(encode, PATCH), "mean colour": mean_colour_encoder(PATCH)}
torch.set_num_threads(2)
for name, encoder in encoders.items():
    for row in dense_nn(encoder, memory, queries, settings).rows:
        print(f"{name}, one image in {row['ratio']} as memory: {100 * row['miou']:.1f} % mIoU")
