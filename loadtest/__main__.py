"""`python -m loadtest`, `warmroute loadtest` and `warmroute demo`.

May import: loadtest.cli.
"""

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand: run, compare, simulate, fleet, calibrate, report or demo. Returns the exit status."""
    from loadtest.cli import main as cli_main

    try:
        return cli_main(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
