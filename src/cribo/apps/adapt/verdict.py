"""Verdict on an adaptation or a distillation, from labelled images or, if there are none, from unlabelled ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from jaxtyping import Int
from torch import Tensor

from cribo.apps.adapt.labelled import Fit, Gain, Labelled, fit_segmentation, gain, score_images
from cribo.base.console import Progress
from cribo.models import Backbone


@dataclass(frozen=True)
class Candidate:
    """A network that may be exported."""

    name: str
    backbone: Backbone


@dataclass(frozen=True)
class Process:
    """What produced the candidates after the first.

    Attributes:
        name: for the sentences.
        criterion: the indicator by which candidates are compared where labels do not decide; higher is better.
        described: the criterion, for the sentences.
    """

    name: str
    criterion: str
    described: str


ADAPTATION = Process("adaptation", "agreement", "Neighbour agreement across views")
DISTILLATION = Process("distillation", "predicted", "Share of the teacher's variance that is predicted")


@dataclass(frozen=True)
class Verdict:
    """The network to keep, and the evidence.

    Attributes:
        kept: name of the chosen candidate.
        sentences: the verdict as text.
        indicators: indicators of each candidate without labels, by name.
        labelled: gain in dense retrieval of each later candidate over the first, on the labelled images.
        segmentation: gain in the score that `cribo segment` estimates with some of these images as examples.
        probes: blocks and head that this segmentation chooses for each candidate.
        second: gain in dense retrieval on the second set.
    """

    kept: str
    sentences: Sequence[str]
    indicators: Mapping[str, Mapping[str, float]]
    labelled: Mapping[str, Gain] = field(default_factory=dict)
    segmentation: Mapping[str, Gain] = field(default_factory=dict)
    probes: Mapping[str, str] = field(default_factory=dict)
    second: Mapping[str, Gain] = field(default_factory=dict)


@dataclass(frozen=True)
class Measures:
    """Results of each candidate on labelled images, by name; empty if there are none.

    Attributes:
        retrieval: confusion matrices of dense retrieval on the labelled images.
        fits: segmentation with some of these images as examples; empty if they are too few.
        second: confusion matrices of dense retrieval on the second set.
    """

    retrieval: Mapping[str, Int[Tensor, "q c c"]]
    fits: Mapping[str, Fit]
    second: Mapping[str, Int[Tensor, "q c c"]]


def measure(
    candidates: Sequence[Candidate], labelled: Labelled | None, second: Labelled | None, *, progress: Progress
) -> Measures:
    """Measure each network on the labelled sets that are given; see `judge` for the arguments."""
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
    return Measures(retrieval, fits, retrieval_second)


def judge(
    candidates: Sequence[Candidate],
    indicators: Mapping[str, Mapping[str, float]],
    labelled: Labelled | None,
    second: Labelled | None,
    *,
    keep_last: bool,
    process: Process,
    progress: Progress,
) -> Verdict:
    """Compare the candidates and choose one.

    See `choose_network` for the rule. Labelled images give two measures: dense retrieval, for `cribo search` and
    `index`, and the score that `cribo segment` estimates with the blocks that it chooses.

    Args:
        candidates: at least two candidates, starting with the given network.
        indicators: indicators of each candidate without labels, among them the criterion of the process.
        labelled: labelled images, if available.
        second: labelled images from another domain, to measure forgetting.
        keep_last: keep the last candidate in any case.
        process: what produced the later candidates.
        progress: called with the phase, the number of processed images and their total.
    """
    measured = measure(candidates, labelled, second, progress=progress)
    retrieval, fits, retrieval_second = measured.retrieval, measured.fits, measured.second
    segmentation = {name: fit.tallies for name, fit in fits.items()}
    measures = [tallies for tallies in (retrieval, segmentation) if tallies]
    names = [each.name for each in candidates]
    kept = names[-1]
    if not keep_last:
        kept = choose_network({name: indicators[name][process.criterion] for name in names}, measures)
    gains = [
        {name: gain(tallies[names[0]], tallies[name]) for name in names[1:]} if tallies else {}
        for tallies in (retrieval, segmentation, retrieval_second)
    ]
    probes = {name: fit.probe for name, fit in fits.items()}
    verdict = Verdict(kept, [], indicators, gains[0], gains[1], probes, gains[2])
    return replace(
        verdict, sentences=_sentences(verdict, names, labelled, second, keep_last=keep_last, process=process)
    )


def choose_network(criterion: Mapping[str, float], measures: Sequence[Mapping[str, Int[Tensor, "q c c"]]]) -> str:
    """Choose the network to keep.

    A network replaces the previous one if the interval of its gain is above 0 in one measure and below 0 in none. If
    all intervals contain 0, or without measures, it does so if its criterion is higher.

    Args:
        criterion: criterion without labels of each network, in the order of comparison.
        measures: confusion matrices per scored image (see `gain`) of each network; empty without labelled images.

    Returns:
        The name of the network.
    """
    kept, *others = criterion
    for name in others:
        gains = [gain(tallies[kept], tallies[name]) for tallies in measures]
        improves = any(found.low > 0 for found in gains) or criterion[name] > criterion[kept]
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
    process: Process,
) -> list[str]:
    kept, first, last = verdict.kept, names[0], names[-1]
    shown = kept if kept != first else last
    sentences = []
    if labelled is None:
        found = ", ".join(f"{name} {verdict.indicators[name][process.criterion]:.0%}" for name in names)
        sentences.append(f"{process.described}, the criterion without labels: {found}.")
    else:
        sentences.append(f"Dense retrieval on {labelled.name} with the {shown}: {_described(verdict.labelled[shown])}.")
    if verdict.segmentation:
        found, probe = verdict.segmentation[shown], verdict.probes[shown]
        sentences.append(f"Segmentation from a few examples with the {shown} ({probe}): {_described(found)}.")
    if kept == first:
        gains = [found[last] for found in (verdict.labelled, verdict.segmentation) if found]
        mixed = any(found.low > 0 for found in gains) and any(found.high < 0 for found in gains)
        reason = "improves one measure and degrades the other" if mixed else "did not help"
        sentences.append(f"Kept the {first}: {process.name} {reason}.")
    else:
        sentences.append(f"Kept the {kept}{', as requested' * keep_last}.")
    if second is not None and kept != first:
        sentences.append(f"On {second.name}: {_described(verdict.second[kept])}.")
    return sentences


def _described(found: Gain) -> str:
    """Return a gain with whether it is significant."""
    how = "better" if found.low > 0 else "worse" if found.high < 0 else "no significant difference"
    return f"{found}, {how}"
