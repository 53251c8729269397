"""`python -m router`: the same as `warmroute`, and as `warmroute serve` when no command is named."""

import sys

from router.cli import main

args = sys.argv[1:]
sys.exit(main(args if args and not args[0].startswith("-") else ["serve", *args]))
