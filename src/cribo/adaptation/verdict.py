"""Verdict on an adaptation or a distillation, from labelled images if given, otherwise from indicators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from jaxtyping import Int
from torch import Tensor

from cribo.adaptation.indicators import Indicators, measure_indicators
from cribo.adaptation.labelled import Fit, Gain, Labelled, fit_segmentation, gain, score_images
from cribo.console import Progress
from cribo.data import ImageSource
from cribo.method import ViewRecipe
from cribo.models import Backbone


@dataclass(frozen=True)
class Candidate:
    """A network that may be exported."""

    name: str
    backbone: Backbone


@dataclass(frozen=True)
class Verdict:
    """The network to keep, and the evidence.

    Attributes:
        kept: name of the chosen candidate.
        sentences: the verdict as text.
        indicators: indicators of each candidate, on the unlabelled images.
        labelled: gain in dense retrieval of each later candidate over the first, on the labelled images.
        segmentation: gain in the score that `cribo segment` estimates with some of these images as examples.
        probes: blocks and head that this segmentation chooses for each candidate.
        second: gain in dense retrieval on the second set.
    """

    kept: str
    sentences: Sequence[str]
    indicators: Mapping[str, Indicators]
    labelled: Mapping[str, Gain] = field(default_factory=dict)
    segmentation: Mapping[str, Gain] = field(default_factory=dict)
    probes: Mapping[str, str] = field(default_factory=dict)
    second: Mapping[str, Gain] = field(default_factory=dict)


@dataclass(frozen=True)
class Measures:
    """What was measured of each candidate, by name; empty where there are no labelled images.

    Attributes:
        indicators: indicators on the unlabelled images.
        retrieval: confusion matrices of dense retrieval on the labelled images.
        fits: segmentation with some of these images as examples; empty if they are too few.
        second: confusion matrices of dense retrieval on the second set.
    """

    indicators: Mapping[str, Indicators]
    retrieval: Mapping[str, Int[Tensor, "q c c"]]
    fits: Mapping[str, Fit]
    second: Mapping[str, Int[Tensor, "q c c"]]


def measure(
    candidates: Sequence[Candidate],
    images: ImageSource,
    recipe: ViewRecipe,
    labelled: Labelled | None,
    second: Labelled | None,
    *,
    progress: Progress,
) -> Measures:
    """Measure each network without labels, and on the labelled sets that are given; see `judge` for the arguments."""
    indicators = {
        each.name: measure_indicators(each.backbone, images, recipe, partial(progress, f"signs of the {each.name}"))
        for each in candidates
    }
    retrieval, retrieval_second = (
        {}
        if known is None
        else {
            each.name: score_images(each.backbone, known, partial(progress, f"{known.name} by the {each.name}"))
            for each in candidates
        }
        for known in (labelled, second)
    )
    fits = {}
    if labelled is not None:
        for each in candidates:
            fit = fit_segmentation(each.backbone, labelled, partial(progress, f"segmentation by the {each.name}"))
            if fit is not None:
                fits[each.name] = fit
    return Measures(indicators, retrieval, fits, retrieval_second)


def judge(
    candidates: Sequence[Candidate],
    images: ImageSource,
    recipe: ViewRecipe,
    labelled: Labelled | None,
    second: Labelled | None,
    *,
    keep_last: bool,
    process: str,
    progress: Progress,
) -> Verdict:
    """Compare the candidates and choose one.

    See `choose_network` for the rule. Labelled images give two measures: dense retrieval, for `cribo search` and
    `index`, and the score that `cribo segment` estimates with the blocks that it chooses.

    Args:
        candidates: at least two candidates, starting with the given network.
        images: unlabelled images.
        recipe: recipe of the views.
        labelled: labelled images, if available.
        second: labelled images from another domain, to measure forgetting.
        keep_last: keep the last candidate in any case.
        process: what produced the later candidates, such as "adaptation", for the sentences.
        progress: called with the phase, the number of processed images and their total.
    """
    measured = measure(candidates, images, recipe, labelled, second, progress=progress)
    indicators, fits = measured.indicators, measured.fits
    retrieval, retrieval_second = measured.retrieval, measured.second
    segmentation = {name: fit.tallies for name, fit in fits.items()}
    measures = [tallies for tallies in (retrieval, segmentation) if tallies]
    names = [each.name for each in candidates]
    kept = names[-1]
    if not keep_last:
        kept = choose_network({name: indicators[name].agreement for name in names}, measures)
    gains = [
        {name: gain(tallies[names[0]], tallies[name]) for name in names[1:]} if tallies else {}
        for tallies in (retrieval, segmentation, retrieval_second)
    ]
    probes = {name: fit.probe for name, fit in fits.items()}
    verdict = Verdict(kept, [], indicators, gains[0], gains[1], probes, gains[2])
    return replace(
        verdict, sentences=_sentences(verdict, names, labelled, second, keep_last=keep_last, process=process)
    )


def choose_network(agreement: Mapping[str, float], measures: Sequence[Mapping[str, Int[Tensor, "q c c"]]]) -> str:
    """Choose the network to keep.

    A network replaces the previous one if the interval of its gain is above 0 in one measure and below 0 in none. If
    all intervals contain 0, or without measures, it does so if its neighbour agreement is higher.

    Args:
        agreement: neighbour agreement of each network, in the order of comparison.
        measures: confusion matrices per scored image (see `gain`) of each network; empty without labelled images.

    Returns:
        The name of the network.
    """
    kept, *others = agreement
    for name in others:
        gains = [gain(tallies[kept], tallies[name]) for tallies in measures]
        improves = any(found.low > 0 for found in gains) or agreement[name] > agreement[kept]
        if improves and not any(found.high < 0 for found in gains):
            kept = name
    return kept


def _sentences(
    verdict: Verdict,
    names: Sequence[str],
    labelled: Labelled | None,
    second: Labelled | None,
    *,
    keep_last: bool,
    process: str,
) -> list[str]:
    kept, first, last = verdict.kept, names[0], names[-1]
    shown = kept if kept != first else last
    sentences = []
    if labelled is None:
        before, after = verdict.indicators[first].agreement, verdict.indicators[last].agreement
        sentences.append(
            f"The neighbour agreement across views is {after:.0%} with the {last} ({first}: {before:.0%}), "
            "the criterion without labels."
        )
    else:
        sentences.append(f"Dense retrieval on {labelled.name} with the {shown}: {_described(verdict.labelled[shown])}.")
    if verdict.segmentation:
        found, probe = verdict.segmentation[shown], verdict.probes[shown]
        sentences.append(f"Segmentation from a few examples with the {shown} ({probe}): {_described(found)}.")
    if kept == first:
        gains = [found[last] for found in (verdict.labelled, verdict.segmentation) if found]
        mixed = any(found.low > 0 for found in gains) and any(found.high < 0 for found in gains)
        reason = f"{process} improves one measure and degrades the other" if mixed else f"{process} did not help"
        sentences.append(f"Kept the {first}: {reason}.")
    else:
        sentences.append(f"Kept the {kept}{', as requested' * keep_last}.")
    if second is not None and kept != first:
        sentences.append(f"On {second.name}: {_described(verdict.second[kept])}.")
    return sentences


def _described(found: Gain) -> str:
    """Return a gain with whether it is significant."""
    how = "better" if found.low > 0 else "worse" if found.high < 0 else "no significant difference"
    return f"{found}, {how}"
