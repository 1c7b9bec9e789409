"""``python -m fedsweep`` is the console script ``fedsweep``."""

import sys

from fedsweep.processes import look_here_last

if __name__ == "__main__":
    look_here_last()  # with -m Python puts the working folder first; nothing may be imported from there before

    from fedsweep.cli import main

    sys.exit(main())
