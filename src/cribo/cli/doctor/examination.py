"""The examination: one section after the other."""

from collections.abc import Callable, Iterator

from cribo.cli.doctor.findings import Section, described
from cribo.cli.doctor.gpus import examine_devices
from cribo.cli.doctor.packages import examine_packages
from cribo.cli.doctor.processor import examine_processor
from cribo.cli.doctor.software import examine_environment, examine_software
from cribo.cli.doctor.storage import examine_storage

_SECTIONS: dict[str, Callable[[Section], None]] = {
    "Software": examine_software,
    "Devices": examine_devices,
    "Processor": examine_processor,
    "Memory and disk": examine_storage,
    "Environment": examine_environment,
    "Optional packages": examine_packages,  # takes longest
}


def examine() -> Iterator[Section]:
    """Examine software, devices, processor, memory, disk, environment and optional packages.

    Nothing is written. What cannot be read is a fact of its section, not an error.

    Yields:
        Sections, one after the other.

    Example:
        >>> [section.title for section in examine()]  # doctest: +SKIP
        ['Software', 'Devices', 'Processor', 'Memory and disk', 'Environment', 'Optional packages']
    """
    for title, fill in _SECTIONS.items():
        section = Section(title)
        try:
            fill(section)
        except Exception as error:  # a broken library or driver is what this command is for
            section.facts["error"] = described(error)
        yield section
