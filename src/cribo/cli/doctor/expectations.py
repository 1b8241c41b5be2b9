"""Expected durations of commands, as text."""

from cribo.cli.doctor.speed import ADAPTED, IMAGE, OBJECTS, PRETRAINED, Speed

NOT_INCLUDED = (
    "Not included: downloads, reading and writing of files, and other programs. Twice the pixels take twice as long or "
    "more, and other networks differ; cribo profile measures a configuration of pretrain on your images."
)
"""What the expectations leave out."""

_IMAGES, _EPOCHS = 10_000, 100
_LABELLED = 1_000
_UNITS = (("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1))


def expectations(speed: Speed) -> dict[str, tuple[str, str]]:
    """Return for each command what was measured, and how long a typical call takes, as text."""
    rows = {name: ("not measured", error) for name, error in speed.failures.items()}
    if (rate := speed.pretrain_rate) is not None:
        rows["pretrain"] = (
            f"{PRETRAINED}, {OBJECTS} objects per image: {rate:.2g} images/s",
            f"{rough(_IMAGES * _EPOCHS / rate)} for {_EPOCHS} epochs of {_IMAGES:,} images",
        )
    if speed.adapt_step is not None and (course := speed.adaptation()) is not None:
        rows["adapt"] = (
            f"{ADAPTED}: {speed.adapt_step:.2g} s per step",
            f"{rough(course.seconds)} by default: closed form {rough(course.closed_form)}, {course.steps} steps "
            f"{rough(course.training)}, verdict {rough(course.verdict)}",
        )
    if (rate := speed.segment_rate) is not None:
        rows["segment"] = (
            f"{ADAPTED}, {IMAGE[1]} x {IMAGE[0]} pixels: {rate:.2g} images/s",
            f"{rough(_LABELLED / rate)} for {_LABELLED:,} images",
        )
    return rows


def rough(seconds: float) -> str:
    """Format a duration with at most two digits, in the largest unit of which there are at least two.

    Example:
        >>> rough(2.34), rough(312), rough(5_800), rough(100_000), rough(4.2e7)
        ('2.3 seconds', '5.2 minutes', '97 minutes', '28 hours', '490 days')
    """
    unit, length = next((unit for unit in _UNITS if seconds >= 2 * unit[1]), _UNITS[-1])
    number = float(f"{seconds / length:.2g}")
    return f"{number:g} {unit}"
