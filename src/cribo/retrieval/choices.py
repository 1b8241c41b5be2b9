"""What dense retrieval can be told. Nothing here needs torch, so that a command line need not wait for it."""

from typing import Literal

FeaturePrecision = Literal["float32", "float16"]
"""The type that features are stored in."""

Vote = Literal["majority", "similarity", "attention"]
PatchLabels = Literal["hard", "soft"]
Interpolation = Literal["bicubic", "bilinear"]
Unlabelled = Literal["drop", "outvote", "class", "first"]
