"""A trial of `cribo serve --label_studio` with a Label Studio that runs: annotations, and predictions after each.

    LABEL_STUDIO_API_KEY=KEY python -m benchmarks.label_studio --url URL --backbone WEIGHTS --data CAMVID

CAMVID has images and labels in the folders train and val, and classes.txt. A project is created, whose tasks are
`--examples` training images and `--images` validation images, and a server of a new memory is connected as its model.
The label maps of the training images are submitted one by one, as brush strokes. Printed are the seconds until the
version of the model has changed, the seconds in which Label Studio gets the predictions of the validation images, and
their mIoU over the classes that occur. KEY is a legacy token. The environment of Label Studio needs
ML_BLOCK_LOCAL_IP=false, SSRF_PROTECTION_ENABLED=false and LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN=true.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from benchmarks.serving import serving
from PIL import Image

from cribo.data.config import spread
from cribo.data.labelled.label_maps import CLASSES_FILE, read_classes
from cribo.data.labelled.label_studio import read_annotation
from cribo.data.labelled.label_studio_writing import Control, brush
from cribo.data.labelled.regions import RegionSet, draw_regions


class Project:
    """A project of Label Studio with images of a labelled set."""

    def __init__(self, client: httpx.Client, data: Path) -> None:
        self.client, self.data = client, data
        self.classes = read_classes(data / CLASSES_FILE).names
        labels = "".join(f'<Label value="{name}"/>' for name in self.classes)
        config = (
            '<View><Image name="image" value="$image"/><BrushLabels name="label" toName="image">'
            f"{labels}</BrushLabels></View>"
        )
        about = self.post("/api/projects", json={"title": "trial of cribo", "label_config": config})
        self.id: int = about["id"]

    def post(self, path: str, **content: Any) -> Any:
        """Send a request that must succeed."""
        answer = self.client.post(path, **content)
        answer.raise_for_status()
        return answer.json()

    def upload(self, split: str, count: int) -> list[tuple[int, Path]]:
        """Upload evenly spread images; return the number of each task and its label map."""
        images = sorted((self.data / "images" / split).iterdir())
        found = []
        for image in (images[number] for number in spread(len(images), count)):
            files = {"file": (image.name, image.read_bytes(), "image/jpeg")}
            self.post(f"/api/projects/{self.id}/import", files=files)
            tasks = self.client.get("/api/tasks", params={"project": self.id, "page_size": 1000}).json()["tasks"]
            label_file = self.data / "labels" / split / f"{image.stem}.png"
            found.append((max(task["id"] for task in tasks), label_file))
        return found

    def annotate(self, task: int, label_file: Path) -> None:
        """Submit the label map of a task as brush strokes."""
        labels, control, results = np.array(Image.open(label_file)), Control("brushlabels"), []
        for label, name in enumerate(self.classes):
            if (labels == label).any():
                results.append(control.result(len(results), name, brush(labels == label), labels.shape))
        self.post(f"/api/tasks/{task}/annotations/", json={"result": results})

    def predict(self, tasks: list[tuple[int, Path]]) -> float:
        """Retrieve predictions of tasks; return their mIoU over the classes that occur."""
        selected = {"all": False, "included": [task for task, _ in tasks]}
        path = f"/api/dm/actions?id=retrieve_tasks_predictions&project={self.id}"
        self.post(path, json={"selectedItems": selected})
        both, either = torch.zeros(len(self.classes)), torch.zeros(len(self.classes))
        for task, label_file in tasks:
            labels = torch.from_numpy(np.array(Image.open(label_file)))
            prediction = max(self.client.get(f"/api/tasks/{task}").json()["predictions"], key=lambda each: each["id"])
            regions = read_annotation(prediction, RegionSet(label_file, [], []), names=(label_file.name,))
            numbers = {name: label for label, name in enumerate(self.classes)}
            size = (labels.shape[0], labels.shape[1])
            found = draw_regions(regions, size, numbers, name=label_file.name, rest=255).map.labels
            for label in range(len(self.classes)):
                own, other = labels == label, (found == label) & (labels != 255)
                both[label] += (own & other).sum()
                either[label] += (own | other).sum()
        return float((both / either)[either > 0].mean())


def main() -> None:
    """Run the trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--images", type=int, default=8)
    options = parser.parse_args()
    headers = {"authorization": f"Token {os.environ['LABEL_STUDIO_API_KEY']}"}
    with (
        tempfile.TemporaryDirectory() as folder,
        httpx.Client(base_url=options.url, headers=headers, timeout=600) as client,
    ):
        project = Project(client, options.data)
        examples = project.upload("train", options.examples)
        targets = project.upload("val", options.images)
        with serving(options.backbone, Path(folder) / "new.safetensors", "--label_studio", options.url) as (address, _):
            project.post("/api/ml", json={"url": address, "project": project.id, "title": "cribo"})
            for number, (task, label_file) in enumerate(examples, start=1):
                version = httpx.get(f"{address}/versions").json()["versions"]
                started = time.perf_counter()
                project.annotate(task, label_file)
                while (about := httpx.get(f"{address}/versions").json())["versions"] == version or about["learning"]:
                    time.sleep(0.05)
                learned = time.perf_counter()
                score = project.predict(targets)
                print(
                    f"{number} annotations: learned in {learned - started:.1f} s, {len(targets)} predictions in "
                    f"{time.perf_counter() - learned:.1f} s, mIoU {score:.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
