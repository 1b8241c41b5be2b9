"""The method of the paper (section 3) in pure PyTorch. Each part can be used alone, in any training loop.

`reference` is a literal, unoptimised training step: start reading there. The other modules are the fast version, in
the order of a step: `views`, `clustering`, `objects`, `matching`, `bank`, `heads`, `losses`.
"""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.method.bank import Matches, MemoryBank
    from cribo.method.clustering import cluster_tokens, cluster_tokens_kmeans, draw_initial_tokens
    from cribo.method.heads import ProjectionHead, PrototypeLayer
    from cribo.method.losses import (
        Centre,
        SelfDistillation,
        cross_image_loss,
        cross_view_loss,
        weighted_cross_entropy,
    )
    from cribo.method.matching import NO_MATCH, cycle_consistency, match_objects
    from cribo.method.objects import pool_objects
    from cribo.method.recipe import ViewRecipe
    from cribo.method.views import (
        Crops,
        cut_views,
        patch_coordinates,
        sample_crops,
    )

__getattr__, __all__ = lazy_names(__name__)
