"""What the terminal shows while a test runs: one line that is kept fresh, or plain lines when nobody watches.

May import: the standard library, rich, loadtest.crowd.
"""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live as RichLive
from rich.text import Text

from loadtest.crowd import Live


class Display:
    """`show` takes the live counts twice a second. Use as a context manager."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live = RichLive(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._stage: tuple[str, str, int] | None = None
        self._began_s = 0.0
        self._before = (0.0, 0)

    def __enter__(self) -> "Display":
        if self._live is not None and not self._quiet:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None and not self._quiet:
            self._live.stop()

    def show(self, arm: str, stage: str, number: int, total: int, live: Live) -> None:
        if self._quiet:
            return
        now_s = time.monotonic()
        if self._stage != (arm, stage, number):
            self._stage = (arm, stage, number)
            self._began_s = now_s
            self._before = (now_s, 0)
            if self._live is None:
                self._console.print(f"[{number}/{total}] {arm}, {stage} ...", highlight=False, markup=False)
        if self._live is not None:
            self._live.update(Text(self.line(arm, stage, number, total, live, now_s)))

    def line(self, arm: str, stage: str, number: int, total: int, live: Live, now_s: float) -> str:
        """Rate, in flight, TTFT so far, errors."""
        then_s, sent = self._before
        rate = (live.sent - sent) / (now_s - then_s) if now_s > then_s else 0.0
        if now_s - then_s > 2.0:
            self._before = (now_s, live.sent)
        ttft = f"{live.ttft_sum_s / live.ttft_count * 1000:.0f} ms" if live.ttft_count else "-"
        failed = f"{live.failed} failed ({live.last_failure})" if live.failed else "0 failed"
        return (
            f"[{number}/{total}] {arm}, {stage}, {now_s - self._began_s:.0f} s | {live.sent} sent, {rate:.1f}/s | "
            f"{live.in_flight} in flight | TTFT {ttft} | {failed}"
        )
