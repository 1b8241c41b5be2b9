"""Names in files are data: the code and the addresses that they name are used only if the user allows it.

Weights, runs, databases and other files may come from anyone. A name that the user writes on the command line, in a
configuration or in Python is the user's word; a name that is read from such a file is not, whether or not its module
has been imported. Every reader of such a file calls one of these functions before it imports or opens what it names.
"""

import os
from collections.abc import Collection

from cribo.errors import Untrusted


def check_import(path: str, file: object, option: str, *, trust: bool, given: Collection[str] = ()) -> None:
    """Check that the import path in a file may be imported.

    Args:
        path: import path of a class or function.
        file: the file that names it, for the error.
        option: option by which the user can name the same path, for the error.
        trust: whether the user trusts the file.
        given: import paths that the user has named.

    Raises:
        Untrusted: the user does not trust the file and has not named the path.

    Example:
        >>> check_import("my_package.Net", "backbone.json", "--architecture", trust=False, given=["my_package.Net"])
    """
    if not trust and path not in given:
        raise Untrusted(
            f"{file} names {path}, which is not part of cribo or timm, and importing it could run any code: if you "
            f"trust its source, allow it with --trust (trust=True in Python), or name it with {option} {path}"
        )


def check_address(source: object, file: object, option: str, *, trust: bool, given: Collection[str] = ()) -> None:
    """Check that a path or address in a file may be opened; paths on this machine may always be.

    Args:
        source: path, URL, or name on the Hugging Face hub.
        file: the file that names it, for the error.
        option: option by which the user can give the same address, for the error.
        trust: whether the user trusts the file.
        given: addresses that the user has given.

    Raises:
        Untrusted: the source is an address, and the user neither trusts the file nor has given the address.

    Example:
        >>> check_address("pictures/train", "mine.db", "--images", trust=False)
    """
    if not trust and is_address(source) and source not in given:
        raise Untrusted(
            f"{file} names the address {source}, which is not opened without your word: give it with {option} "
            f"{source}, or if you trust the file's source, add --trust (trust=True in Python)"
        )


def is_address(source: object) -> bool:
    """Whether a string is a URL or a name on the Hugging Face hub.

    Example:
        >>> [is_address(source) for source in ("s3://bucket/a", "hf:/owner/name", "C:/images", "vit_small_patch16_224")]
        [True, True, False, False]
    """
    text = os.fspath(source) if isinstance(source, os.PathLike) else source
    return isinstance(text, str) and ("://" in text or text.startswith(("hf:", "hf-hub:")))
