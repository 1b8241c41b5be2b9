"""Text of files and visitors in Markdown and HTML of the page."""

import re

_SPECIAL = re.compile(r"""["#$&'*:<>@\[\\\]^_`{|}~]|(?<=www)\.""", re.IGNORECASE)  # also links without brackets


def as_text(text: object) -> str:
    """Escape text so that Markdown and HTML show it unchanged, on one line.

    Required for everything that comes from files, options or visitors: names of classes, images and folders. Line
    breaks become spaces, and characters that cannot be printed become U+FFFD.

    Example:
        >>> as_text("a-1.png"), as_text("<b>*"), as_text("www.example")
        ('a-1.png', '&#60;b&#62;&#42;', 'www&#46;example')
    """
    line = " ".join(str(text).split())
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", printable)
