"""The verdict: did adaptation help? By labelled images if given, otherwise by signs that need no labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cribo.adaptation.config import Keep
from cribo.adaptation.labelled import Gain, Labelled, gain, score_images
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
        labelled: gain of each later candidate over the starting weights, on the labelled images.
        second: the same on the second set.
    """

    kept: str
    sentences: Sequence[str]
    signs: Mapping[str, Signs]
    labelled: Mapping[str, Gain] = field(default_factory=dict)
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

    A candidate replaces the one before it if the interval of its gain on the labelled images lies above 0. If the
    interval contains 0, or without labels, it does so if its neighbour agreement is higher.

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
    tallies = [
        {}
        if known is None
        else {
            each.name: score_images(each.backbone, known, partial(progress, f"{known.name} by the {each.name}"))
            for each in candidates
        }
        for known in (labelled, second)
    ]
    kept, *others = (each.name for each in candidates)
    for name in others:
        better = signs[name].agreement > signs[kept].agreement
        if tallies[0]:
            difference = gain(tallies[0][kept], tallies[0][name])
            better = difference.low > 0 or (better and difference.high >= 0)
        if better or keep == "adapted":
            kept = name
    first = candidates[0].name
    gains, others_gains = (
        {name: gain(scores[first], scores[name]) for name in others} if scores else {} for scores in tallies
    )
    sentences = _sentences(kept, first, signs, gains, labelled, keep)
    if second is not None and kept != first:
        sentences.append(_of_second(others_gains[kept], second))
    return Verdict(kept, sentences, signs, gains, others_gains)


def _sentences(
    kept: str, first: str, signs: Mapping[str, Signs], gains: Mapping[str, Gain], labelled: Labelled | None, keep: Keep
) -> list[str]:
    last = list(signs)[-1]
    sentences = []
    if labelled is None:
        before, after = signs[first].agreement, signs[last].agreement
        sentences.append(
            f"Neighbours across views agree in {after:.0%} with the {last} (starting weights: {before:.0%}); without "
            "labels, this is the sign to go by."
        )
    else:
        shown = kept if kept != first else last
        found = gains[shown]
        how = "better" if found.low > 0 else "worse" if found.high < 0 else "no difference beyond chance"
        sentences.append(f"Dense retrieval on {labelled.name} with the {shown}: {found}, {how}.")
    if kept == first:
        sentences.append("Kept the starting weights: adaptation did not help.")
    elif keep == "adapted" and kept == last:
        sentences.append(f"Kept the {kept}, as asked for.")
    else:
        sentences.append(f"Kept the {kept}.")
    return sentences


def _of_second(found: Gain, second: Labelled) -> str:
    how = "better, too" if found.low > 0 else "some is forgotten" if found.high < 0 else "no difference beyond chance"
    return f"On {second.name}: {found}, {how}."
