"""`python -m cribo.cli` is the command `cribo`, too."""

import sys

from cribo.cli import main

if __name__ == "__main__":
    sys.exit(main())
