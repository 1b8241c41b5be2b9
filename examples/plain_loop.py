"""CrIBo in a plain PyTorch loop with the functions of `cribo.method`, without the trainer.

    python examples/plain_loop.py

Trains twenty steps on synthetic scenes and prints the losses. The loop contains all parts of the method: two views,
clustering of the teacher's tokens, objects, matches in the memory bank, the three losses, and the moving average.
"""

import copy
from typing import Any

import torch
from torch import nn

from cribo.data.scenes import Scenes
from cribo.method import (
    MemoryBank,
    ProjectionHead,
    PrototypeLayer,
    SelfDistillation,
    ViewRecipe,
    cluster_tokens,
    cross_image_loss,
    cross_view_loss,
    cut_views,
    draw_initial_tokens,
    patch_coordinates,
    pool_objects,
    sample_crops,
)
from cribo.models import build_backbone

STEPS, BATCH, SIZE, K, PROTOTYPES = 20, 8, 64, 8, 64
TOKENS = (SIZE // 8) ** 2

generator = torch.Generator().manual_seed(0)
images, recipe = Scenes(STEPS * BATCH), ViewRecipe(size=SIZE)
backbone = build_backbone("vit_tiny_patch16_224", args={"patch_size": 8, "depth": 3}, image_size=SIZE)
dim = backbone.embed_dim
student = nn.ModuleDict(
    {
        "backbone": backbone,
        "head": ProjectionHead(dim, hidden_dim=256, bottleneck_dim=64),
        "image": PrototypeLayer(64, PROTOTYPES),
        "object": PrototypeLayer(64, PROTOTYPES),
    }
)
teacher = copy.deepcopy(student).requires_grad_(False)
bank = MemoryBank(num_images=64, num_objects=K, dim=dim)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)


def level(name: str) -> SelfDistillation:
    """Return prototypes, centre (not used here) and temperatures of the image or object level."""
    layers: list[Any] = [student[name], teacher[name]]
    return SelfDistillation(layers[0].weight, layers[1].weight, torch.zeros(PROTOTYPES), 0.1, 0.04)


for step in range(STEPS):
    numbers = torch.arange(step * BATCH, (step + 1) * BATCH)
    crops = [sample_crops(96, 96, recipe, generator=generator) for _ in numbers]
    pairs = zip(numbers.tolist(), crops, strict=True)
    views = torch.cat([cut_views(images.load(number), crop, SIZE) for number, crop in pairs]) / 255  # (2B, 3, H, W)
    boxes, flips = torch.stack([crop.boxes for crop in crops]), torch.stack([crop.flips for crop in crops])
    coordinates = patch_coordinates(boxes, flips, (SIZE // 8, SIZE // 8))  # (B, 2, N, 2)

    with torch.no_grad():
        global_t, tokens_t, _ = teacher["backbone"](views)
        tokens_t = tokens_t.unflatten(0, (BATCH, 2))  # (B, 2, N, D)
        labels = cluster_tokens(
            tokens_t.flatten(1, 2),
            coordinates.flatten(1, 2),
            num_objects=K,
            initial_tokens=torch.stack([draw_initial_tokens(2 * TOKENS, K, generator=generator) for _ in numbers]),
            position_weight=1.0,
        ).view(tokens_t.shape[:3])
        objects, kept = pool_objects(tokens_t, labels, K)  # (B, 2, K, D), (B, K)
        rows, clusters = kept.nonzero(as_tuple=True)
        found_t = objects[rows, :, clusters].transpose(0, 1)  # (2, R, D), the objects in both views
        matches = bank.match(found_t, numbers[rows])
        view, row = matches.valid.nonzero(as_tuple=True)
        neighbours = teacher["head"](bank.objects(view, matches.nearest[view, row]))

    global_s, tokens_s, _ = student["backbone"](views)
    found_s = pool_objects(tokens_s.unflatten(0, (BATCH, 2)), labels, K)[0][rows, :, clusters].transpose(0, 1)
    by_view_t, by_view_s = (z.unflatten(0, (BATCH, 2)).transpose(0, 1) for z in (global_t, global_s))
    objects_t, objects_s = teacher["head"](found_t), student["head"](found_s)
    losses = {
        "image": cross_view_loss(student["head"](by_view_s), teacher["head"](by_view_t), level("image")),
        "cross-view": cross_view_loss(objects_s, objects_t, level("object")),
        "cross-image": cross_image_loss(objects_s, neighbours, matches.valid, level("object")),
    }
    optimizer.zero_grad()
    torch.stack(list(losses.values())).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for average, new in zip(teacher.parameters(), student.parameters(), strict=True):
            average.lerp_(new, 0.01)
    bank.push(found_t, numbers[rows], kept.sum(dim=1).tolist())
    print(f"step {step + 1:2}", *(f"{name} {loss.item():.2f}" for name, loss in losses.items()), sep="  ")
