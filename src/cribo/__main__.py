"""Entry point of `python -m cribo`."""

import sys

from cribo.cli import main

if __name__ == "__main__":
    sys.exit(main())
