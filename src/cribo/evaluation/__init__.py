"""Evaluation protocols for dense features, their common runner, and a common format of results."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.evaluation.cache import Machine
    from cribo.evaluation.comparison import compare
    from cribo.evaluation.correspondence.protocol import Correspondence, CorrespondenceData
    from cribo.evaluation.data import ImageData, SegmentationData, Splits
    from cribo.evaluation.dense_neighbours.protocol import DenseNN
    from cribo.evaluation.dense_neighbours.retrieval import dense_nn
    from cribo.evaluation.depth.protocol import Depth, DepthData
    from cribo.evaluation.detection.protocol import Detection, DetectionData
    from cribo.evaluation.discovery.protocol import Discovery, DiscoveryData
    from cribo.evaluation.image_neighbours.protocol import ImageNN
    from cribo.evaluation.image_neighbours.retrieval import image_nn
    from cribo.evaluation.overclustering.protocol import Overclustering
    from cribo.evaluation.protocol import Outcome, Protocol
    from cribo.evaluation.results import EvaluationResult, read_result
    from cribo.evaluation.runner import Run, evaluate
    from cribo.evaluation.runtime import EvaluationRuntime, TrainingRuntime
    from cribo.evaluation.scores import iou
    from cribo.evaluation.segmentation.protocol import FinetunedSegmenter, Linear
    from cribo.evaluation.segmentation.trained import load_segmenter
    from cribo.evaluation.video.protocol import VideoData, VideoPropagation

__getattr__, __all__ = lazy_names(__name__)
