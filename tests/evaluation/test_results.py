import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cribo.base.errors import FolderError, ResultError
from cribo.evaluation.results import RESULTS, EvaluationResult, percent, read_result, result_tables
from cribo.features.scores import iou


def a_result(count: int = 3, **changes: Any) -> EvaluationResult:
    names = [f"class {number}" for number in range(count)]
    scores = [(number + 1) / (count + 2) for number in range(count)]
    rows = [
        {
            "ratio": ratio,
            "miou": 1 / 3 / ratio,
            "miou_std": None if ratio == 1 else 0.004,
            "per_class": dict(zip(names, [value / ratio for value in scores], strict=True)),
            "draws": (1 / 3 / ratio,),
            "memory_patches": 12345 / ratio,
            "confusion": torch.arange(count * (count + 1)).view(count, count + 1),
        }
        for ratio in (1, 8)
    ]
    values: dict[str, Any] = {
        "evaluation": "dense-nn",
        "settings": {"variant": "cribo", "ratios": (1, 8), "size": None, "optim": {"lr": 0.1}},
        "backbone": {"name": "mine", "architecture": "vit_small_patch16_224"},
        "data": {"name": "camvid", "root": Path("sets") / "camvid", "partial": False},
        "classes": names,
        "metrics": ["miou"],
        "varies": "ratio",
        "results": rows,
        "seconds": 65.0,
        "versions": {"python": "3.11.7", "hardware": "a machine"},
        "command": "cribo evaluate dense-nn",
        "evaluation_title": "Dense nearest-neighbour retrieval",
    }
    return EvaluationResult(**{**values, **changes})


def printed(result: EvaluationResult) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for table in result_tables(result):
            console.print(table)
    return capture.get()


# ------------------------------------------------------------------------ IoU


@pytest.mark.parametrize("extra", [0, 1])
def test_iou_is_intersection_over_union_of_pixels(extra: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (4000,), generator=generator)
    labels[labels == 3] = 4  # class 3 is predicted, but never labelled
    predicted = torch.randint(0, 6 + extra, (4000,), generator=generator)
    labels[labels == 2], predicted[predicted == 2] = 0, 0  # class 2 is neither predicted nor labelled
    confusion = torch.zeros(6, 6 + extra, dtype=torch.long)
    confusion.index_put_((labels, predicted), torch.ones(4000, dtype=torch.long), accumulate=True)
    found = iou(confusion)
    for number in range(6):
        is_label, is_predicted = labels == number, predicted == number
        union = int((is_label | is_predicted).sum())
        if union:
            assert found[number].item() == int((is_label & is_predicted).sum()) / union
        else:
            assert math.isnan(found[number])
    assert math.isnan(found[2])
    assert found[3] == 0


def test_iou_requires_a_column_for_each_class() -> None:
    with pytest.raises(ValueError, match="a column for each of its 3 rows, got 2"):
        iou(torch.zeros(3, 2, dtype=torch.long))


# ----------------------------------------------------------------------- file


def test_results_are_read_as_written(tmp_path: Path) -> None:
    result = a_result()
    path = result.write(tmp_path / "new")
    assert path == tmp_path / "new" / RESULTS
    assert read_result(tmp_path / "new") == read_result(path) == result


def test_the_file_stores_exact_values(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [{**row, "per_class": {"class 0": nan, "class 1": 0.1}} for row in a_result().results]
    content = json.loads(
        a_result(results=rows).write(tmp_path).read_text(),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )
    first, second = content["results"]
    assert (first["ratio"], first["miou"], first["miou_std"]) == (1, 1 / 3, None)
    assert (second["ratio"], second["miou"], second["miou_std"]) == (8, 1 / 3 / 8, 0.004)
    assert first["per_class"] == {"class 0": None, "class 1": 0.1}
    assert first["confusion"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert content["settings"] == {"variant": "cribo", "ratios": [1, 8], "size": None, "optim": {"lr": 0.1}}
    assert content["data"]["root"] == str(Path("sets") / "camvid")
    assert content["format"] == 1


def test_headings_of_a_file_need_no_protocol(tmp_path: Path) -> None:
    path = a_result(evaluation="my.Own", evaluation_title="Own protocol", class_metric="AP").write(tmp_path)
    read = read_result(path)
    assert read.title == "Own protocol (cribo) on CamVid"
    assert "AP of each class [%]" in printed(read)
    content = json.loads(path.read_text())
    del content["evaluation_title"], content["class_metric"]  # as in files of earlier versions
    path.write_text(json.dumps(content))
    read = read_result(path)
    assert (read.title, read.class_metric) == ("my.Own (cribo) on CamVid", "IoU")


def test_confusion_rows_are_written_on_one_line(tmp_path: Path) -> None:
    lines = a_result().write(tmp_path).read_text().splitlines()
    assert sum(line.strip().rstrip(",") == "[4, 5, 6, 7]" for line in lines) == 2


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    a_result().write(tmp_path)
    with pytest.raises(FolderError, match=r"results\.json already exists: choose another folder"):
        a_result(command="another").write(tmp_path)
    assert read_result(tmp_path).command == a_result().command


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"nowhere does not exist: give the output folder of a finished evaluation"):
        read_result(tmp_path / "nowhere")
    with pytest.raises(ResultError, match=r"results\.json does not exist: give the output folder"):
        read_result(tmp_path)


def damaged(content: dict[str, Any], change: str) -> str:
    text = json.dumps(content)
    if change == "truncated":
        return text[: len(text) // 2]
    if change == "list":
        return "[]"
    if change == "foreign":
        return '{"results": []}'
    if change == "newer":
        return json.dumps({**content, "format": 2})
    if change == "row":
        del content["results"][1]["miou"]
    if change == "key":
        del content["classes"]
    if change == "kind":
        content["results"] = 3
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("truncated", "is not valid JSON"),
        ("list", "is not a result of an evaluation"),
        ("foreign", "is not a result of an evaluation"),
        ("newer", r"has format 2, this version of cribo reads up to 1: update cribo"),
        ("key", "is corrupt: it has no 'classes'"),
        ("kind", "is corrupt: 'results' must be a list, got 3"),
        ("row", r"is corrupt: row 1 of the results lacks miou"),
    ],
)
def test_damaged_files_are_explained(tmp_path: Path, change: str, message: str) -> None:
    path = a_result().write(tmp_path)
    path.write_text(damaged(json.loads(path.read_text()), change))
    with pytest.raises(ResultError, match=message):
        read_result(tmp_path)


def test_binary_files_are_explained(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_bytes(b"\xff\xfe\x00PNG")
    with pytest.raises(ResultError, match="is not valid JSON"):
        read_result(tmp_path)


def test_values_that_cannot_be_stored_are_named() -> None:
    with pytest.raises(TypeError, match=r"must be JSON serialisable, got device\(type='cpu'\)"):
        a_result(settings={"optim": {"device": torch.device("cpu")}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": {"source": "x"}}, r"backbone must have a name, got \['source'\]"),
        ({"results": []}, "must have a metric and a row"),
        ({"metrics": ["miou", "accuracy"]}, "row 0 of the results lacks accuracy"),
        ({"seconds": "long"}, "'seconds' must be a float, got 'long'"),
    ],
)
def test_incomplete_results_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_result(**changes)


# --------------------------------------------------------------------- tables


def test_tables_show_values_classes_and_settings() -> None:
    text = printed(a_result(seconds=3725.0))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert rows[:2] == [["1/1", "33.3", "12,345"], ["1/8", "4.2 ± 0.4", "1,543"]]
    assert rows[2:] == [["class 0", "20.0", "2.5"], ["class 1", "40.0", "5.0"], ["class 2", "60.0", "7.5"]]
    assert "Dense nearest-neighbour retrieval (cribo) on CamVid" in text
    for said in (
        "variant cribo",
        "size each image's own",
        "optim.lr 0.1",
        "ratios 1, 8",
        "partial no",
        "1:02:05 on a machine",
    ):
        assert said in text


def test_only_best_and_worst_of_many_classes_are_shown() -> None:
    result = a_result(41)
    rows = [{**row, "per_class": {**row["per_class"], "class 40": None}} for row in result.results]
    text = printed(dataclasses.replace(result, results=rows))
    shown = [line.split()[2] for line in text.splitlines() if line.startswith("│ class")]
    # The last class would be the best, but does not occur.
    assert shown == [str(number) for number in (*range(39, 29, -1), *range(9, -1, -1))]
    assert "best and worst of 41 classes, see results.json for all" in text


def test_forty_classes_are_all_shown_in_order() -> None:
    shown = [line.split()[2] for line in printed(a_result(40)).splitlines() if line.startswith("│ class")]
    assert shown == [str(number) for number in range(40)]


def test_names_are_printed_unchanged() -> None:
    names = ["[bold]wall[/bold]", "[/]", "sky"]
    rows = [{**row, "per_class": dict.fromkeys(names, 0.5)} for row in a_result().results]
    result = a_result(results=rows, backbone={"name": "[red]mine"})
    text = printed(dataclasses.replace(result, classes=names))
    assert "[bold]wall[/bold]" in text
    assert "[/]" in text
    assert "[red]mine" in text


def test_a_result_without_classes_has_no_table_of_classes() -> None:
    rows = [{"neighbours": 20, "top1": 0.382, "top5": None}]
    text = printed(
        a_result(evaluation="image-nn", classes=[], metrics=["top1", "top5"], varies="neighbours", results=rows)
    )
    assert "IoU" not in text
    assert "top-1 [%]" in text
    assert [cell.strip() for cell in text.splitlines()[4].split("│")[1:-1]] == ["20", "38.2", percent(None)]
