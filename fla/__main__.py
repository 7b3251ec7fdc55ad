# SPDX-License-Identifier: MIT
"""`python -m fla`: the same command line as `fla`."""

import sys

from fla.cli import main

if __name__ == "__main__":
    sys.exit(main())
