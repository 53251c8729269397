"""A run as one self-contained HTML page with hand-written SVG. Pure."""

from loadtest.samples import Run


def render(run: Run) -> str:
    """The page."""
    return "<!doctype html>"
