"""The method of the paper (section 3) in pure PyTorch. Each part can be used alone, in any training loop.

`reference` is a literal, unoptimised training step: start reading there. The other modules are the fast version, in
the order of a step: `views`, `clustering`, `objects`, `matching`, `bank`, `heads`, `losses`. The losses of
`headfree` are not in the paper.
"""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.method.bank import Matches, MemoryBank
    from cribo.method.clustering import cluster_tokens, cluster_tokens_kmeans, draw_initial_tokens
    from cribo.method.headfree import cosine_distance, gram_loss, soft_neighbour_loss
    from cribo.method.heads import ProjectionHead, PrototypeLayer
    from cribo.method.losses import (
        Centre,
        SelfDistillation,
        cross_image_loss,
        cross_view_loss,
        mean_over_groups,
        sinkhorn_centre,
        weighted_cross_entropy,
    )
    from cribo.method.matching import NO_MATCH, cycle_consistency, match_objects
    from cribo.method.objects import pool_objects
    from cribo.method.recipe import ViewRecipe
    from cribo.method.views import (
        Crops,
        Photometric,
        apply_photometric,
        cut_views,
        patch_coordinates,
        sample_crops,
        sample_photometric,
    )

__getattr__, __all__ = lazy_names(__name__)
