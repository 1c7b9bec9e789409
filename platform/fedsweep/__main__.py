"""``python -m fedsweep`` is the console script ``fedsweep``."""

import contextlib
import sys

from fedsweep.errors import ResourceError
from fedsweep.processes import look_here_last

if __name__ == "__main__":
    with contextlib.suppress(ResourceError):  # which the command tells
        look_here_last()  # with -m Python puts the working folder first; nothing may be imported from there before

    from fedsweep.cli import main

    sys.exit(main())
