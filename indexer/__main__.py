"""`python -m indexer`: the same as `warmroute index`."""

import sys

from router.cli import main

sys.exit(main(["index", *sys.argv[1:]]))
