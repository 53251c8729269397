"""The nouns and the arithmetic that router and indexer share. Pure: no I/O, no clock, no randomness."""
