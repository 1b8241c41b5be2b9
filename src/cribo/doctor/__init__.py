"""Examination of a machine and its installation: versions, devices, limits, packages, speed (docs/doctor.md)."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.doctor.examination import examine as examine
    from cribo.doctor.findings import Section as Section
    from cribo.doctor.speed import Speed as Speed
    from cribo.doctor.speed import measure_speed as measure_speed
else:
    __getattr__, __all__ = lazy_names(__name__)
