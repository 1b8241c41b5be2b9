"""Evaluation protocols for dense features, their common runner, and a common format of results."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.evaluation.comparison import compare as compare
    from cribo.evaluation.config import EvaluationRuntime as EvaluationRuntime
    from cribo.evaluation.config import TrainingRuntime as TrainingRuntime
    from cribo.evaluation.correspondence.config import CorrespondenceData as CorrespondenceData
    from cribo.evaluation.correspondence.protocol import Correspondence as Correspondence
    from cribo.evaluation.data import ImageData as ImageData
    from cribo.evaluation.data import SegmentationData as SegmentationData
    from cribo.evaluation.data import Splits as Splits
    from cribo.evaluation.dense_neighbours.protocol import DenseNN as DenseNN
    from cribo.evaluation.dense_neighbours.protocol import dense_nn as dense_nn
    from cribo.evaluation.depth.config import DepthData as DepthData
    from cribo.evaluation.depth.protocol import Depth as Depth
    from cribo.evaluation.detection.config import DetectionData as DetectionData
    from cribo.evaluation.detection.protocol import Detection as Detection
    from cribo.evaluation.discovery.config import DiscoveryData as DiscoveryData
    from cribo.evaluation.discovery.protocol import Discovery as Discovery
    from cribo.evaluation.image_neighbours.protocol import ImageNN as ImageNN
    from cribo.evaluation.image_neighbours.protocol import image_nn as image_nn
    from cribo.evaluation.overclustering.protocol import Overclustering as Overclustering
    from cribo.evaluation.protocol import Outcome as Outcome
    from cribo.evaluation.protocol import Protocol as Protocol
    from cribo.evaluation.results import EvaluationResult as EvaluationResult
    from cribo.evaluation.results import read_result as read_result
    from cribo.evaluation.run import Run as Run
    from cribo.evaluation.runner import evaluate as evaluate
    from cribo.evaluation.segmentation.finetuning import FinetunedSegmenter as FinetunedSegmenter
    from cribo.evaluation.segmentation.linear import Linear as Linear
    from cribo.evaluation.segmentation.trained import load_segmenter as load_segmenter
    from cribo.evaluation.video.config import VideoData as VideoData
    from cribo.evaluation.video.protocol import VideoPropagation as VideoPropagation
else:
    __getattr__, __all__ = lazy_names(__name__)
