"""`python -m indexer`: the same as `warmroute index`."""

import sys

from router.cli import main

args = sys.argv[1:]
sys.exit(main(args if args[:1] == ["index"] else ["index", *args]))
