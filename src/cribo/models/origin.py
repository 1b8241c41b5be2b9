"""Origin of a backbone's weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cribo.models.config import NetworkName

_COMMIT = 7  # shown digits


@dataclass(frozen=True)
class LoadedWeights:
    """Origin of a backbone's weights, key by key.

    Attributes:
        source: the file, the timm name, or the name on the Hugging Face hub.
        format: the recognised format, such as `MoCo v3`.
        network: `teacher` or `student`; None if the source contains one network.
        part: the prefix of the network's keys in the file, such as `teacher/module.backbone.`; may be empty.
        used: keys that were loaded.
        dropped: keys that were ignored, by group (head, decoder, student, ...).
        resampled: parameters that were resized to the backbone's patch or image size.
        notes: notes for the user, such as a position embedding that the original resizes in another way.
        revision: commit of the files on the Hugging Face hub; None for other sources.
        parent: owner/name on the hub of the weights, or of those from which the weights of a file or run were made.
    """

    source: str
    format: str
    network: NetworkName | None = None
    part: str = ""
    used: tuple[str, ...] = ()
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    resampled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    revision: str | None = None
    parent: str | None = None

    def __str__(self) -> str:
        """Summary in one line."""
        network = f", its {self.network}" if self.network else ""
        part = f" ({self.part})" if self.part else ""
        left_out = ", ".join(f"{len(keys)} keys of {group}" for group, keys in self.dropped.items())
        left_out = f"; ignored {left_out}" if left_out else ""
        resampled = f"; resized {', '.join(self.resampled)}" if self.resampled else ""
        notes = "".join(f"; {note}" for note in self.notes)
        commit = f" ({self.revision[:_COMMIT]})" if self.revision else ""
        used = f"{len(self.used)} keys used"
        return f"{self.source}{commit}: {self.format}{network}{part}, {used}{left_out}{resampled}{notes}"
