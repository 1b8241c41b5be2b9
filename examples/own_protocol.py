"""A custom evaluation protocol: each patch is assigned the class with the most similar mean feature.

    python examples/own_protocol.py

or, in the folder of this file, on the command line with all options, pictures and tables:

    cribo evaluate own_protocol.ClassMeans --backbone mean-colour --data scenes --limit 40
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cribo.evaluation.protocol import Outcome, Protocol

if TYPE_CHECKING:
    from cribo.evaluation.run import Run


@dataclass(frozen=True, kw_only=True)
class ClassMeans(Protocol):
    """Classification of patches by the mean features of the classes.

    Attributes:
        sizes: sides of the square images in pixels, one row of results each.
    """

    name: ClassVar[str] = "class-means"
    title: ClassVar[str] = "Class means"
    metrics: ClassVar[tuple[str, ...]] = ("miou",)
    varies: ClassVar[str] = "size"

    sizes: tuple[int, ...] = (96, 192)

    def measure(self, run: "Run") -> Outcome:
        """Compute the means from the training images, and score the patches of the validation images."""
        import torch
        import torch.nn.functional as F

        from cribo.features.scores import count_confusion, iou

        classes, rows = run.data.train.classes, []
        for size in self.sizes:
            train, val = (run.patches(images, size=(size, size)) for images in (run.data.train, run.data.val))
            means, confusion = torch.zeros(len(classes), train.dim), torch.zeros(2 * [len(classes)]).long()
            for view, counts in train.counts.items():  # (N, C + 1) pixels of each class in each patch, sparse
                means += torch.from_numpy(counts[:, :-1].T @ train.features(view).numpy())
            for view, counts in val.counts.items():
                labels = torch.from_numpy(counts.toarray()).argmax(dim=1)
                known = labels < len(classes)
                predicted = (val.features(view) @ F.normalize(means, dim=1).T).argmax(dim=1)
                confusion += count_confusion(labels[known], predicted[known], len(classes))
            per_class = iou(confusion)
            row = {"size": size, "miou": float(per_class.nanmean()), "confusion": confusion}
            rows.append({**row, "per_class": dict(zip(classes, per_class.tolist(), strict=True))})
        return Outcome(rows, classes)


if __name__ == "__main__":
    from cribo.evaluation import EvaluationRuntime, SegmentationData, evaluate

    runtime = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    with tempfile.TemporaryDirectory() as folder:
        data = SegmentationData("scenes", limit=40)
        result, _ = evaluate(ClassMeans(), "mean-colour", data, runtime, out=Path(folder) / "result")
    for row in result.results:
        print(f"mean colour, images of {row['size']} pixels: {100 * row['miou']:.1f} % mIoU")
