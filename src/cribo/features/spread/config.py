"""Options for the work on many machines, shared by the commands; does not import Ray."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.base.packages import require_packages
from cribo.base.shares import Share


@dataclass
class RayOptions:
    """Options of `--engine ray`.

    Attributes:
        address: of a running cluster, such as 10.0.0.1:6379, or auto for the one of this machine. [a temporary cluster
            of this machine alone]
        workers: number of worker processes, each with its own copy of the backbone. [one for each GPU of the cluster;
            without GPUs, one for every four cores]
        gpus_per_worker: GPUs of each worker; a fraction shares a GPU. [1 if the cluster has GPUs, else 0]
        cpus_per_worker: logical CPUs of each worker. [an equal share]
    """

    address: str | None = None
    workers: Annotated[int, at_least(1)] | None = None
    gpus_per_worker: Annotated[float, at_least(0)] | None = None
    cpus_per_worker: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "ray.")


@dataclass(kw_only=True)
class EngineOptions:
    """Options of commands whose work can be spread.

    Attributes:
        engine: local works in this process, ray on a Ray cluster; requires the extra `cluster`.
        ray: options of --engine ray.
        part: i/n works on the i-th of n equal shares of the images, for example in a job array; cribo merge joins the
            results. [all images]
    """

    engine: Literal["local", "ray"] = "local"
    ray: RayOptions = field(default_factory=RayOptions)
    part: str | None = None

    @property
    def share(self) -> Share:
        """The share of the images to work on."""
        return Share.parse(self.part)

    def check_engine(self) -> None:
        """Check the options.

        Raises:
            ConfigError: `part` is malformed or out of range, or options of Ray are given without --engine ray.
            MissingPackage: Ray is not installed, and the engine is ray.
        """
        if self.engine == "ray":
            require_ray()
        assert self.share
        given = [name for name, value in vars(self.ray).items() if value is not None]
        if given and self.engine != "ray":
            raise ConfigError(f"--ray.{given[0]} requires --engine ray")


def require_ray() -> None:
    """Raise MissingPackage if Ray is not installed."""
    require_packages("--engine ray", "ray", extra="cluster", otherwise=", or use --engine local")
