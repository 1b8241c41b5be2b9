"""Polygons: simplification."""

from typing import Any

import numpy as np
import pytest
from scipy.ndimage import distance_transform_edt, gaussian_filter

from cribo.data.labelled.outlines import pixels_of, runs_of, simplified
from cribo.data.labelled.regions import trace


@pytest.mark.parametrize("seed", range(5))
def test_simplified_polygons_stay_near(seed: int) -> None:
    """No pixel farther than the tolerance from the border changes, and steps of an oblique border are one line."""
    smooth: Any = gaussian_filter(np.random.default_rng(seed).normal(size=(60, 80)), 8)
    for region in trace((smooth > 0).astype(np.uint8), [1]):
        ring = np.array(region.rings[0], dtype=np.float64)
        found = simplified(ring, 1.0)
        assert {*map(tuple, found)} <= {*map(tuple, ring)}
        assert len(found) < max(4, 0.7 * len(ring))
        before, after = (pixels_of(runs_of([each], 60, 80), 60, 80) for each in (ring, found))
        inner: Any = distance_transform_edt(before)
        outer: Any = distance_transform_edt(~before)
        assert np.maximum(inner, outer)[before != after].max(initial=0) <= 2


def test_a_simplified_polygon_has_an_area() -> None:
    thin = np.array([(0, 0), (9, 0), (9, 1), (0, 1)], dtype=np.float64)
    assert len(simplified(thin, 5.0)) >= 3
