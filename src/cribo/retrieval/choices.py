"""Options of dense retrieval, in a module that does not import torch, so that command lines start quickly."""

from typing import Literal

FeaturePrecision = Literal["float32", "float16"]
"""Data type of stored features."""

Vote = Literal["majority", "similarity", "attention"]
PatchLabels = Literal["hard", "soft"]
Interpolation = Literal["bicubic", "bilinear"]
Unlabelled = Literal["drop", "outvote", "class", "first"]
