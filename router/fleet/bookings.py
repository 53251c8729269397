"""What this router itself has under way: the load signal that is never late.

A booking is made in the same step as the choice and taken back however the request ends. Counts belong to one life of
a worker: when a pod goes and comes back, an old booking is released on the old counters (H21). No I/O; the clock is
handed in. May import: the standard library, router.core, router.fleet.rates.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import TracebackType

from router.core.types import BlockKey, Clock, WorkerAddress
from router.fleet.rates import PrefillRates

PLACED_WINDOW_S = 600.0  # at 180, a prompt that was evicted after some minutes was placed as if nothing had been
PLACED_GRAIN_S = 1.0


class WorkerLoad:
    """The counts of one life of one worker."""

    __slots__ = (
        "decode_context_tokens", "inflight_requests", "placed", "placed_tokens", "prefill_tokens", "requests_total",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prefill_tokens = 0  # work sent and not yet at first token, see router.policy.pick.prefill_tokens
        self.inflight_requests = 0
        self.decode_context_tokens = 0  # prompt tokens of requests that are past their first token
        self.requests_total = 0
        self.placed: deque[tuple[float, int]] = deque()  # when, and the prompt's tokens
        self.placed_tokens = 0  # their sum


class Booking:
    """One request on one worker. A context manager; `first_token` and `release` are idempotent."""

    __slots__ = (
        "_crowd", "_crowd_key", "_eased", "_learn", "_load", "_on_first_token", "_on_release", "_on_void",
        "_prefill_tokens", "_prompt_tokens", "_state",
    )  # fmt: skip

    def __init__(
        self,
        load: WorkerLoad,
        *,
        prefill_tokens: int,
        prompt_tokens: int,
        crowd: Counter[BlockKey],
        crowd_key: BlockKey | None,
        on_first_token: Callable[[], None] | None = None,
        on_void: Callable[[], None] | None = None,
        on_release: Callable[[], None] | None = None,
        learn: Callable[[], None] | None = None,
        eased: Callable[[], None] | None = None,
    ) -> None:
        self._load = load
        self._eased = eased
        self._learn = learn
        self._prefill_tokens = prefill_tokens
        self._prompt_tokens = prompt_tokens
        self._crowd = crowd
        self._crowd_key = crowd_key
        self._on_first_token = on_first_token
        self._on_void = on_void
        self._on_release = on_release
        self._state = "prefill"
        load.prefill_tokens += prefill_tokens
        load.inflight_requests += 1
        load.requests_total += 1
        if crowd_key is not None:
            crowd[crowd_key] += 1

    def first_token(self, *, streamed: bool = True) -> None:
        """Prefill is done: the first byte of the answer's content was seen.

        `streamed`: it came when the first token was there, not when all were, so its time says how fast prefill is.
        """
        if self._state == "prefill":
            if streamed and self._learn is not None:
                self._learn()
            self._state = "decode"
            self._load.prefill_tokens -= self._prefill_tokens
            self._load.decode_context_tokens += self._prompt_tokens
            if self._on_first_token is not None:
                self._on_first_token()
            if self._eased is not None:
                self._eased()

    def assume_prefilled(self) -> None:
        """The prompt should be computed by now, and nothing says so: a reply in one piece begins when all is done."""
        if self._state == "prefill":
            self._load.prefill_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            if self._eased is not None:
                self._eased()

    def void(self) -> None:
        """The worker refused the request, or broke before it answered: its cache is not what was expected of it."""
        if self._state == "prefill" and self._on_void is not None:
            self._on_void()
            self._on_void = None

    def release(self) -> None:
        """The request has ended, however."""
        if self._state == "over":
            return
        if self._state == "prefill":
            self._load.prefill_tokens -= self._prefill_tokens
        else:
            self._load.decode_context_tokens -= self._prompt_tokens
        self._load.inflight_requests -= 1
        self._state = "over"
        if self._on_release is not None:
            self._on_release()
        if self._crowd_key is not None:
            left = self._crowd[self._crowd_key] - 1
            if left > 0:
                self._crowd[self._crowd_key] = left
            else:
                del self._crowd[self._crowd_key]
        if self._eased is not None:
            self._eased()

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Bookings:
    """All workers' counts, and how many requests in flight share a deepest known block (`crowd`)."""

    def __init__(self, *, rates: PrefillRates | None = None, clock: Clock = time.monotonic) -> None:
        self.rates = rates  # None: nothing is learnt
        self._clock = clock
        self._loads: dict[WorkerAddress, WorkerLoad] = {}
        self._crowd: Counter[BlockKey] = Counter()
        self.usual_prompt_tokens = 0.0  # a moving mean over about the last twenty requests
        self.eased: Callable[[], None] | None = None  # called whenever a worker may have less to do than before

    def of(self, worker: WorkerAddress) -> WorkerLoad:
        """The counts of the worker's present life."""
        load = self._loads.get(worker)
        if load is None:
            load = self._loads[worker] = WorkerLoad()
        return load

    def hold(
        self,
        worker: WorkerAddress,
        *,
        prefill_tokens: int = 0,
        prompt_tokens: int = 0,
        crowd_key: BlockKey | None = None,
        on_first_token: Callable[[], None] | None = None,
        on_void: Callable[[], None] | None = None,
        on_release: Callable[[], None] | None = None,
        exact: bool = False,
    ) -> Booking:
        """Book a request; release it by leaving the `with` block or by `release()`.

        `on_first_token` is called once, when the prompt has been computed; `on_void` once, if it never was;
        `on_release` once, when the request has ended.
        `exact`: the tokens are counted, not guessed, so the time to the first one may be learnt from.
        """
        load = self.of(worker)
        self.usual_prompt_tokens += (prompt_tokens - self.usual_prompt_tokens) * (
            0.05 if self.usual_prompt_tokens else 1
        )
        return Booking(
            load,
            prefill_tokens=prefill_tokens,
            prompt_tokens=prompt_tokens,
            crowd=self._crowd,
            crowd_key=crowd_key,
            on_first_token=on_first_token,
            on_void=on_void,
            on_release=on_release,
            learn=self._lesson(worker, load.prefill_tokens + max(prefill_tokens, 1)) if exact else None,
            eased=self.eased,
        )

    def _lesson(self, worker: WorkerAddress, ahead_tokens: int) -> Callable[[], None] | None:
        """What to do at the first token to learn the worker's rate from it."""
        rates, begun_s = self.rates, self._clock()
        if rates is None:
            return None
        load = self._loads[worker]

        def learn() -> None:
            if self._loads.get(worker) is load:  # still the same life
                rates.observe(worker, ahead_tokens, self._clock() - begun_s)

        return learn

    def crowd(self, key: BlockKey | None) -> int:
        """Requests in flight whose deepest known block is `key`."""
        return 0 if key is None else self._crowd.get(key, 0)

    def loads(self) -> Mapping[WorkerAddress, WorkerLoad]:
        """All workers' counts, for telling other routers. A view, not a copy."""
        return self._loads

    def crowds(self) -> Mapping[BlockKey, int]:
        """All crowds in flight, for telling other routers. A view, not a copy."""
        return self._crowd

    def place(self, worker: WorkerAddress, prompt_tokens: int) -> None:
        """A prompt that nobody held goes there: its cache will be this much fuller."""
        load, now_s = self.of(worker), self._clock()
        load.placed_tokens += prompt_tokens
        if load.placed and now_s - load.placed[-1][0] < PLACED_GRAIN_S:
            since_s, tokens = load.placed.pop()
            load.placed.append((since_s, tokens + prompt_tokens))
        else:
            load.placed.append((now_s, prompt_tokens))

    def placed_tokens(self, worker: WorkerAddress) -> int:
        """Tokens of such prompts within PLACED_WINDOW_S."""
        load = self.of(worker)
        if load.placed:
            oldest_s = self._clock() - PLACED_WINDOW_S
            while load.placed and load.placed[0][0] < oldest_s:
                load.placed_tokens -= load.placed.popleft()[1]
        return load.placed_tokens

    def retire(self, worker: WorkerAddress) -> None:
        """This life of the worker is over; bookings still open are released on its old counts."""
        self._loads.pop(worker, None)
        if self.rates is not None:
            self.rates.retire(worker)

    @property
    def inflight_requests(self) -> int:
        return sum(load.inflight_requests for load in self._loads.values())
