import torch

from cribo.objectives.cluster_record import ClusterHistory
from cribo.pretraining.figures.layout import consistent_numbers, covered, lay_out_clusters, lay_out_features


def test_an_object_keeps_its_number_regardless_of_its_index() -> None:
    now = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2]])
    renumbered = torch.tensor([[4, 4, 3, 3, 0, 0], [4, 4, 3, 0, 0, 0]])
    before, after = consistent_numbers(torch.stack([renumbered, now]))
    assert [before[4], before[3], before[0]] == [after[0], after[1], after[2]]
    assert len(set(after.values())) == 3


def test_clusters_of_one_view_have_no_number_and_new_objects_get_a_free_one() -> None:
    first = torch.tensor([[0, 0, 1, 2], [0, 0, 1, 3]])
    last = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0]])
    before, after = consistent_numbers(torch.stack([first, last]))
    assert set(before) == {0, 1}
    assert before[0] == after[0]
    assert before[1] != before[0]


def test_a_pair_without_objects_is_drawn() -> None:
    none = torch.tensor([[0, 0], [1, 1]])
    assert consistent_numbers(torch.stack([none, none])) == [{}, {}]


def test_the_figure_of_clusters_has_a_column_for_each_epoch() -> None:
    views = torch.randint(0, 256, (2, 2, 3, 8, 8), dtype=torch.uint8)
    labels = torch.randint(0, 3, (3, 2, 2, 4))
    figure = lay_out_clusters(ClusterHistory(views, (2, 2), (0, 2, 9), labels), pairs=5)
    assert len(figure.axes) == 4 * 4
    assert [axes.get_title() for axes in figure.axes[:4]] == ["views", "epoch 0", "epoch 2", "epoch 9"]


def test_images_wrap_and_are_drawn_above_their_colours() -> None:
    pictures = [torch.full((4, 6, 3), shade / 10).numpy() for shade in range(5)]
    painted = [1 - picture for picture in pictures]
    figure = lay_out_features(pictures, painted, columns=3)
    shown = [axes.images[0].get_array() if axes.images else None for axes in figure.axes]
    assert len(shown) == 12
    for number, place in enumerate((0, 1, 2, 6, 7)):
        assert (shown[place] == pictures[number]).all()
        assert (shown[place + 3] == painted[number]).all()
    assert shown[8] is None


def test_pairs_are_sorted_by_their_covered_area() -> None:
    labels = torch.tensor([[[0, 0, 1], [2, 2, 2]], [[0, 0, 1], [0, 3, 3]], [[0, 1, 2], [2, 1, 0]]])
    assert covered(labels).tolist() == [0, 3, 6]
