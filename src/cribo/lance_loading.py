"""Import of Lance, the file format of large tables."""

import os
from typing import Any

from cribo.errors import MissingPackage
from cribo.installation import install_command


def load_lance(purpose: str) -> Any:
    """Import Lance.

    Raises:
        MissingPackage: it is not installed; the message begins with `purpose`.
    """
    os.environ.setdefault("LANCE_LOG", "error")  # read at import; it warns about every table that it creates
    try:
        import lance
    except ModuleNotFoundError as error:
        raise MissingPackage(f"{purpose} needs Lance: {install_command('search')}") from error
    return lance
