"""The method of the paper (section 3) in pure PyTorch. Each part can be used alone, in any training loop.

`reference` is a literal, unoptimised training step: start reading there. The other modules are the fast version, in
the order of a step: `views`, `clustering`, `objects`, `matching`, `bank`, `heads`, `losses`.
"""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.method.bank import Matches as Matches
    from cribo.method.bank import MemoryBank as MemoryBank
    from cribo.method.clustering import cluster_tokens as cluster_tokens
    from cribo.method.clustering import cluster_tokens_kmeans as cluster_tokens_kmeans
    from cribo.method.clustering import draw_initial_tokens as draw_initial_tokens
    from cribo.method.config import ViewRecipe as ViewRecipe
    from cribo.method.heads import ProjectionHead as ProjectionHead
    from cribo.method.heads import PrototypeLayer as PrototypeLayer
    from cribo.method.losses import Centre as Centre
    from cribo.method.losses import SelfDistillation as SelfDistillation
    from cribo.method.losses import cross_image_loss as cross_image_loss
    from cribo.method.losses import cross_view_loss as cross_view_loss
    from cribo.method.losses import weighted_cross_entropy as weighted_cross_entropy
    from cribo.method.matching import NO_MATCH as NO_MATCH
    from cribo.method.matching import cycle_consistency as cycle_consistency
    from cribo.method.matching import match_objects as match_objects
    from cribo.method.objects import pool_objects as pool_objects
    from cribo.method.views import Crops as Crops
    from cribo.method.views import cut_views as cut_views
    from cribo.method.views import patch_coordinates as patch_coordinates
    from cribo.method.views import sample_crops as sample_crops
else:
    __getattr__, __all__ = lazy_names(__name__)
