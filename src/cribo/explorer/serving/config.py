"""What a server serves, and limits of its requests; does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cribo.base.bounds import above, at_least, check_bounds
from cribo.features.config import BackboneSource


@dataclass
class ServeConfig:
    """Contents of the server of `cribo serve`.

    Attributes:
        memory: memory file, as `cribo segment --memory` writes it. It is read again when another command changes it.
            With --label_studio, it grows, and may be new.
        backbone: the backbone with which the memory was created.
        batch_size: number of images that are labelled at once, if so many are waiting. Lower it if the device runs out
            of memory.
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
        label_studio: address of a Label Studio, such as http://127.0.0.1:8080, to be its ML backend: annotations that
            are submitted there are added to the memory file. Images are fetched from this address only, with the access
            token of LABEL_STUDIO_API_KEY or --label_studio_key_file.

    Raises:
        ConfigError: a value is out of range.
    """

    memory: Path
    backbone: BackboneSource
    batch_size: Annotated[int, at_least(1)] = 8
    device: str | None = None
    label_studio: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests.

    Attributes:
        max_waiting: number of pictures that may be in progress; further ones are refused with status 503, to be sent
            again later.
        max_per_minute: number of requests of one client address per minute. Behind a reverse proxy, all clients have
            its address. [no limit]
        timeout: seconds in which a picture must arrive, and then be labelled.

    Raises:
        ConfigError: a value is out of range.
    """

    max_waiting: Annotated[int, at_least(1)] = 32
    max_per_minute: Annotated[int, at_least(1)] | None = None
    timeout: Annotated[float, above(0)] = 60.0

    def __post_init__(self) -> None:
        check_bounds(self)
