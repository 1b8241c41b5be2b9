import numpy as np

from cribo.base.painting import MARK, outline_region, paint_regions, region_places


def test_the_place_of_a_ring_is_on_the_ring() -> None:
    labels = np.zeros((300, 300), dtype=int)
    labels[50:250, 50:250] = 1
    labels[100:200, 100:200] = 0
    x, y, radius = region_places(labels)[1]
    assert labels[round(y), round(x)] == 1
    assert 15 < radius <= 30


def test_painted_regions_have_their_colour_and_others_are_grey() -> None:
    picture = np.full((8, 8, 3), (200, 100, 30), dtype=np.uint8)
    labels = np.zeros((8, 8), dtype=int)
    labels[2:6, 2:6] = 5
    painted = paint_regions(picture, labels, {5: (0, 114, 178)})
    assert painted[2, 3].tolist() == [0, 114, 178]  # outline
    assert painted[3, 3].tolist() == [48, 116, 154]  # over grey of half the contrast
    assert len(set(painted[0, 0].tolist())) == 1


def test_an_outlined_region_keeps_its_own_colours() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    inside = np.zeros((30, 40), dtype=bool)
    inside[10:20, 10:20] = True
    outlined = outline_region(picture, inside)
    np.testing.assert_array_equal(outlined[inside], picture[inside])
    assert outlined[9, 12].tolist() == list(MARK)
    assert (outlined[8, 12] < 40).all()
    assert len(set(outlined[0, 0].tolist())) == 1
