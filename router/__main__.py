"""`python -m router`: the same as `warmroute serve`."""

import sys

from router.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
