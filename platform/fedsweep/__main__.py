"""``python -m fedsweep`` is the console script ``fedsweep``."""

import sys

from fedsweep.cli import main

if __name__ == "__main__":
    sys.exit(main())
