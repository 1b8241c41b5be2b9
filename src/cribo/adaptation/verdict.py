"""The verdict: did adaptation help? By labelled images if given, otherwise by signs that need no labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from jaxtyping import Int
from torch import Tensor

from cribo.adaptation.config import Keep
from cribo.adaptation.labelled import Gain, Labelled, fit_segmentation, gain, score_images
from cribo.adaptation.signs import Signs, measure_signs
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
        kept: name of the candidate.
        sentences: the verdict in words.
        signs: of each candidate, on the unlabelled images.
        labelled: gain in dense retrieval of each later candidate over the starting weights, on the labelled images.
        segmentation: the same in the score that `cribo segment` expects with some of these images as examples.
        probes: blocks and head that this segmentation chooses with each candidate.
        second: gain in dense retrieval on the second set.
    """

    kept: str
    sentences: Sequence[str]
    signs: Mapping[str, Signs]
    labelled: Mapping[str, Gain] = field(default_factory=dict)
    segmentation: Mapping[str, Gain] = field(default_factory=dict)
    probes: Mapping[str, str] = field(default_factory=dict)
    second: Mapping[str, Gain] = field(default_factory=dict)


def judge(
    candidates: Sequence[Candidate],
    images: ImageSource,
    recipe: ViewRecipe,
    labelled: Labelled | None,
    second: Labelled | None,
    *,
    keep: Keep,
    progress: Progress,
) -> Verdict:
    """Compare the candidates and choose one.

    See `choose_network` for the rule. On labelled images, there are two measures: dense retrieval, which is what `cribo
    search` and `index` do with features, and the score that `cribo segment` expects, which chooses its own blocks.

    Args:
        candidates: at least two, beginning with the starting weights.
        images: unlabelled.
        recipe: how views are drawn.
        labelled: labelled images, if there are any.
        second: labelled images of another kind, to measure what is forgotten.
        keep: `adapted` keeps the last candidate in any case.
        progress: called with the phase, and how many images of how many are done.
    """
    signs = {
        each.name: measure_signs(each.backbone, images, recipe, partial(progress, f"signs of the {each.name}"))
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
    segmentation = {name: fit.tallies for name, fit in fits.items()}
    measures = [tallies for tallies in (retrieval, segmentation) if tallies]
    names = [each.name for each in candidates]
    kept = names[-1]
    if keep == "better":
        kept = choose_network({name: signs[name].agreement for name in names}, measures)
    gains = [
        {name: gain(tallies[names[0]], tallies[name]) for name in names[1:]} if tallies else {}
        for tallies in (retrieval, segmentation, retrieval_second)
    ]
    probes = {name: fit.probe for name, fit in fits.items()}
    verdict = Verdict(kept, [], signs, gains[0], gains[1], probes, gains[2])
    return replace(verdict, sentences=_sentences(verdict, names, labelled, second, keep))


def choose_network(agreement: Mapping[str, float], measures: Sequence[Mapping[str, Int[Tensor, "q c c"]]]) -> str:
    """Choose the network to keep.

    A network replaces the one before it if the interval of its gain in one of the measures lies above 0 and none lies
    below 0. If all intervals contain 0, or without measures, it does so if its neighbour agreement is higher.

    Args:
        agreement: neighbour agreement of each network, in the order in which they are compared.
        measures: confusions of each scored image (see `gain`) by each network; none without labelled images.

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
    verdict: Verdict, names: Sequence[str], labelled: Labelled | None, second: Labelled | None, keep: Keep
) -> list[str]:
    kept, first, last = verdict.kept, names[0], names[-1]
    shown = kept if kept != first else last
    sentences = []
    if labelled is None:
        before, after = verdict.signs[first].agreement, verdict.signs[last].agreement
        sentences.append(
            f"Neighbours across views agree in {after:.0%} with the {last} (starting weights: {before:.0%}); without "
            "labels, this is the sign to go by."
        )
    else:
        sentences.append(f"Dense retrieval on {labelled.name} with the {shown}: {_told(verdict.labelled[shown])}.")
    if verdict.segmentation:
        found, probe = verdict.segmentation[shown], verdict.probes[shown]
        sentences.append(f"Segmentation by a few examples with the {shown} ({probe}): {_told(found)}.")
    if kept == first:
        gains = [found[last] for found in (verdict.labelled, verdict.segmentation) if found]
        mixed = any(found.low > 0 for found in gains) and any(found.high < 0 for found in gains)
        reason = "adaptation helps one measure and harms the other" if mixed else "adaptation did not help"
        sentences.append(f"Kept the starting weights: {reason}.")
    else:
        sentences.append(f"Kept the {kept}{', as asked for' * (keep == 'adapted')}.")
    if second is not None and kept != first:
        sentences.append(f"On {second.name}: {_told(verdict.second[kept])}.")
    return sentences


def _told(found: Gain) -> str:
    how = "better" if found.low > 0 else "worse" if found.high < 0 else "no difference beyond chance"
    return f"{found}, {how}"
