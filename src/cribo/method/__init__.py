"""The paper's section 3 as a library: pure PyTorch, each piece usable in anyone's own training loop.

In the order in which they happen in a step: `views`, `clustering`, `objects`, `matching`, `memory`, `heads`,
`losses`.
"""

from cribo.method.clustering import cluster_tokens, cluster_tokens_kmeans, draw_initial_tokens
from cribo.method.heads import ProjectionHead, PrototypeLayer
from cribo.method.losses import (
    Centre,
    SelfDistillation,
    Targets,
    cross_image_loss,
    cross_image_targets,
    cross_view_loss,
    cross_view_targets,
    prototype_loss,
    prototype_losses,
    sinkhorn_centre,
)
from cribo.method.matching import NO_MATCH, cycle_consistency, match_objects
from cribo.method.memory import Matches, MemoryBank
from cribo.method.objects import kept_clusters, pool_kept_objects, pool_objects
from cribo.method.sharded import ShardedMemoryBank
from cribo.method.views import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Crops,
    Photometric,
    ViewRecipe,
    apply_photometric,
    cut_views,
    normalise,
    patch_coordinates,
    sample_crops,
    sample_photometric,
)

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "NO_MATCH",
    "Centre",
    "Crops",
    "Matches",
    "MemoryBank",
    "Photometric",
    "ProjectionHead",
    "PrototypeLayer",
    "SelfDistillation",
    "ShardedMemoryBank",
    "Targets",
    "ViewRecipe",
    "apply_photometric",
    "cluster_tokens",
    "cluster_tokens_kmeans",
    "cross_image_loss",
    "cross_image_targets",
    "cross_view_loss",
    "cross_view_targets",
    "cut_views",
    "cycle_consistency",
    "draw_initial_tokens",
    "kept_clusters",
    "match_objects",
    "normalise",
    "patch_coordinates",
    "pool_kept_objects",
    "pool_objects",
    "prototype_loss",
    "prototype_losses",
    "sample_crops",
    "sample_photometric",
    "sinkhorn_centre",
]
