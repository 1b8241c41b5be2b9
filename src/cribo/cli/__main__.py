"""`python -m cribo.cli` runs the command `cribo`."""

import sys

from cribo.cli import main

if __name__ == "__main__":
    sys.exit(main())
