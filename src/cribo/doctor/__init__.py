"""Examination of a machine and its installation: versions, devices, limits, packages, speed (docs/doctor.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.doctor.examination import examine
    from cribo.doctor.findings import Section
    from cribo.doctor.speed import Speed, measure_speed

__getattr__, __all__ = lazy_names(__name__)
