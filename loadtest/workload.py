"""Who asks what, when: seed -> sessions of prompts with shared prefixes. Pure.

A prompt is a row of `Segment`s, slices of endless token streams: equal slices are equal tokens, so shared prefixes,
chat histories and answers need no text. `block_hashes` names a prompt's blocks for the simulator, `token_ids` and
`words` spell it out for a crowd over HTTP. A session's next turn starts after the answer to the one before.
May import: the standard library, msgspec.
"""

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec


class Segment(NamedTuple):
    """`tokens` tokens of the stream `content`, beginning at token `start`."""

    content: int
    tokens: int
    start: int = 0


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request. `answer` is what the reply counts as when a later prompt repeats it."""

    prompt: tuple[Segment, ...]
    output_tokens: int
    answer: Segment
    think_s: float = 0.0  # between the answer before and this request; 0 in a first turn
    group: str = ""  # a label for reports
    adapter: str = ""  # a LoRA adapter's name; turns of different adapters share no streams, as they share no blocks

    @property
    def prompt_tokens(self) -> int:
        return sum(s.tokens for s in self.prompt)


class Session(msgspec.Struct, frozen=True, gc=False):
    """Turns in order, each sent when the one before is answered. `start_s` counts from the stage's begin."""

    start_s: float
    turns: tuple[Turn, ...]


class Stage(msgspec.Struct, frozen=True):
    """Sent, then drained before the next begins. With `concurrency`, sessions start as others end (closed loop)."""

    name: str
    sessions: tuple[Session, ...]
    rate_per_s: float = 0.0  # 0: not by rate
    seconds: float = 0.0
    concurrency: int | None = None
    measured: bool = True  # false: warm-up


class Workload(msgspec.Struct, frozen=True):
    """Stages in order."""

    name: str
    stages: tuple[Stage, ...]


LADDER_STAGES: tuple[tuple[float, float], ...] = (
    (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21), (40, 38), (43, 36), (46, 33),
    (49, 30), (52, 29), (55, 27), (57, 26), (60, 25),
)  # fmt: skip
"""Rate in requests/s and seconds of the published 16 x H100 benchmark."""


def poisson(rng: Random, rate_per_s: float, seconds: float) -> list[float]:
    """Arrival times of an open loop."""
    times: list[float] = []
    t = rng.expovariate(rate_per_s)
    while t < seconds:
        times.append(t)
        t += rng.expovariate(rate_per_s)
    return times


def ladder(
    seed: int,
    *,
    groups: int = 150,
    prompts_per_group: int = 5,
    prefix_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 1000,
    warmup: tuple[float, float] | None = (15, 50),
    stages: Sequence[Sequence[float]] = LADDER_STAGES,
) -> Workload:
    """The published ladder: a fixed corpus, shuffled once, walked from its start in every stage.

    As the published generator does, a stage sends exactly rate x seconds requests (one or two passes over the corpus).
    """
    rng = Random(seed)
    corpus = []
    for g in range(groups):
        prefix = Segment(rng.getrandbits(60), prefix_tokens)
        corpus += [(prefix, Segment(rng.getrandbits(60), question_tokens), f"g{g}") for _ in range(prompts_per_group)]
    rng.shuffle(corpus)
    built = []
    for i, (rate, seconds) in enumerate(([warmup] if warmup else []) + [tuple(s) for s in stages]):
        count = round(rate * seconds)
        times = sorted(rng.uniform(0, seconds) for _ in range(count))  # a Poisson process of known count
        sessions = []
        for t, (prefix, question, group) in zip(times, itertools.cycle(corpus), strict=False):
            turn = Turn((prefix, question), output_tokens, Segment(rng.getrandbits(60), output_tokens), group=group)
            sessions.append(Session(t, (turn,)))
        warm = bool(warmup) and i == 0
        name = "warm-up" if warm else f"{rate:g}/s"
        built.append(Stage(name, tuple(sessions), rate, seconds, measured=not warm))
    return Workload("ladder", tuple(built))


def shared_prefix(
    seed: int,
    *,
    rate: float,
    seconds: float,
    groups: int,
    prefix_tokens: int,
    question_tokens: int,
    output_tokens: int,
    zipf: float = 0.0,
    hot_share: float = 0.0,
    common_tokens: int = 0,
    prompts_per_group: int = 0,
) -> Workload:
    """Open loop over groups with one prefix each. `zipf` 0 = all alike; `hot_share` of the requests goes to group 0;
    every prompt begins with `common_tokens` shared by all. `prompts_per_group` 0 = every question is new."""
    rng = Random(seed)
    common = Segment(rng.getrandbits(60), common_tokens)
    prefixes = [Segment(rng.getrandbits(60), prefix_tokens) for _ in range(groups)]
    questions = [[rng.getrandbits(60) for _ in range(prompts_per_group)] for _ in range(groups)]
    cumulative = list(itertools.accumulate((g + 1) ** -zipf for g in range(groups)))
    sessions = []
    for t in poisson(rng, rate, seconds):
        hot = rng.random() < hot_share
        g = 0 if hot else bisect.bisect(cumulative, rng.random() * cumulative[-1])
        q = rng.choice(questions[g]) if prompts_per_group else rng.getrandbits(60)
        prompt = tuple(s for s in (common, prefixes[g], Segment(q, question_tokens)) if s.tokens)
        sessions.append(Session(t, (_single(rng, prompt, output_tokens, "hot" if hot else f"g{g}"),)))
    return _one_stage("shared-prefix", sessions, rate, seconds)


def cold(seed: int, *, rate: float, seconds: float, prompt_tokens: int, output_tokens: int) -> Workload:
    """Open loop of prompts that share nothing."""
    rng = Random(seed)
    sessions = [
        Session(
            t, (_single(rng, (Segment(rng.getrandbits(60), prompt_tokens),), output_tokens, f"cold{prompt_tokens}"),)
        )
        for t in poisson(rng, rate, seconds)
    ]
    return _one_stage("cold", sessions, rate, seconds)


def chat(
    seed: int,
    *,
    rate: float,
    seconds: float,
    systems: int = 10,
    system_tokens: int = 1000,
    turns_mean: float = 5.0,
    first_tokens: int = 300,
    next_tokens: int = 150,
    output_tokens: int = 250,
    think_s: float = 8.0,
    prior_tokens: int = 0,
) -> Workload:
    """Multi-turn conversations; `rate` counts new sessions. Turns are geometric, lengths exponential around the means.

    `prior_tokens` > 0 gives every session a long document of its own before the first message.
    """
    rng = Random(seed)
    system = [Segment(rng.getrandbits(60), system_tokens) for _ in range(systems)]
    sessions = []
    for t in poisson(rng, rate, seconds):
        s = rng.randrange(systems)
        history: tuple[Segment, ...] = (system[s],) if system_tokens else ()
        if prior_tokens:
            history += (Segment(rng.getrandbits(60), prior_tokens),)
        turns: list[Turn] = []
        while True:
            mean = next_tokens if turns else first_tokens
            history += (Segment(rng.getrandbits(60), 1 + int(rng.expovariate(1 / mean))),)
            think = rng.expovariate(1 / think_s) if turns else 0.0
            output = 1 + min(int(rng.expovariate(1 / output_tokens)), 8 * output_tokens)
            turn = Turn(history, output, Segment(rng.getrandbits(60), output), think, f"system{s}")
            turns.append(turn)
            history += (turn.answer,)
            if rng.random() < 1 / turns_mean:
                break
        sessions.append(Session(t, tuple(turns)))
    return _one_stage("chat", sessions, rate, seconds)


def adapters(
    seed: int,
    *,
    rate: float,
    seconds: float,
    adapters: int,
    zipf: float,
    system_tokens: int,
    question_tokens: int,
    output_tokens: int,
    base_share: float = 0.0,
) -> Workload:
    """Open loop over LoRA adapters, each with a system prompt of its own; a share of the requests is of the base model.
    Answers are exponential around the mean."""
    rng = Random(seed)
    systems = [Segment(rng.getrandbits(60), system_tokens) for _ in range(adapters + 1)]
    cumulative = list(itertools.accumulate((a + 1) ** -zipf for a in range(adapters)))
    sessions = []
    for t in poisson(rng, rate, seconds):
        a = bisect.bisect(cumulative, rng.random() * cumulative[-1])
        name = "" if rng.random() < base_share else f"adapter{a}"
        system = systems[a if name else adapters]
        prompt = tuple(s for s in (system, Segment(rng.getrandbits(60), question_tokens)) if s.tokens)
        output = 1 + min(int(rng.expovariate(1 / output_tokens)), 8 * output_tokens)
        answer = Segment(rng.getrandbits(60), output)
        sessions.append(Session(t, (Turn(prompt, output, answer, group=name or "base", adapter=name),)))
    return _one_stage("adapters", sessions, rate, seconds)


def bursts(
    seed: int,
    *,
    siblings: int,
    every_s: float,
    seconds: float,
    prefix_tokens: int,
    question_tokens: int,
    output_tokens: int,
) -> Workload:
    """`siblings` requests at once, every `every_s`, that share a prefix nobody has seen."""
    rng = Random(seed)
    sessions = []
    for i in range(int(seconds / every_s)):
        prefix = Segment(rng.getrandbits(60), prefix_tokens)
        for _ in range(siblings):
            prompt = (prefix, Segment(rng.getrandbits(60), question_tokens))
            sessions.append(Session(i * every_s, (_single(rng, prompt, output_tokens, f"burst{i}"),)))
    return _one_stage("bursts", sessions, siblings / every_s, seconds)


def rag(
    seed: int,
    *,
    rate: float,
    seconds: float,
    document_tokens: Sequence[int],
    documents_per_prompt: int = 4,
    zipf: float = 0.8,
    system_tokens: int = 200,
    question_tokens: int = 40,
    output_tokens: int = 64,
) -> Workload:
    """A system prompt, some documents in shuffled order, a question."""
    rng = Random(seed)
    system = Segment(rng.getrandbits(60), system_tokens)
    documents = [Segment(rng.getrandbits(60), n) for n in document_tokens]
    cumulative = list(itertools.accumulate((d + 1) ** -zipf for d in range(len(documents))))
    sessions = []
    for t in poisson(rng, rate, seconds):
        chosen: dict[int, Segment] = {}
        while len(chosen) < documents_per_prompt:
            d = bisect.bisect(cumulative, rng.random() * cumulative[-1])
            chosen[d] = documents[d]
        order = list(chosen.values())
        rng.shuffle(order)
        prompt = (system, *order, Segment(rng.getrandbits(60), question_tokens))
        sessions.append(Session(t, (_single(rng, prompt, output_tokens, "rag"),)))
    return _one_stage("rag", sessions, rate, seconds)


def timed_trace(
    rows: Sequence[Mapping[str, Any]],
    *,
    seconds: float = 1e9,
    speed: float = 1.0,
    offset_s: float = 0.0,
    start_share: float = 0.0,
) -> Workload:
    """Mooncake and Azure rows: {timestamp ms, input_length, output_length, hash_ids of 512-token prefix blocks}.

    Without hash_ids (Azure) every prompt is its own. `start_share`: begin after this share of the rows' time and go
    on with what was left out, so that one trace gives several unlike samples.
    """
    fresh = itertools.count(1)
    sessions = []
    whole_s = max((row["timestamp"] for row in rows), default=0) / 1000.0 + 1.0
    for row in rows:
        t = row["timestamp"] / 1000.0 - offset_s
        if start_share:
            t = (t - start_share * whole_s) % whole_s
        t /= speed
        if not 0 <= t < seconds:
            continue
        n = max(int(row["input_length"]), 1)
        prompt = _runs(row.get("hash_ids") or (), 512, n, 1 << 50) or (Segment((1 << 51) + next(fresh), n),)
        output = max(int(row["output_length"]), 1)
        sessions.append(Session(t, (Turn(prompt, output, Segment((1 << 52) + next(fresh), output), group="trace"),)))
    sessions.sort(key=lambda s: s.start_s)
    length_s = min(seconds, sessions[-1].start_s + 1.0 if sessions else 1.0)
    return _one_stage("trace", sessions, len(sessions) / length_s, length_s)


def agent_trace(
    rows: Iterable[Mapping[str, Any]],
    *,
    concurrency: int,
    seed: int = 0,
    max_turns: int = 1_000_000,
    max_think_s: float = 60.0,
) -> Workload:
    """Coding-agent sessions in a closed loop, their order by seed; block ids are local to a session, as in the data."""
    sessions = []
    for i, row in enumerate(rows):
        turns = []
        for k, turn in enumerate(row["turns"][:max_turns]):
            n, output = max(int(turn["input_length"]), 1), max(int(turn["output_length"]), 1)
            prompt = _runs(turn["hash_ids"], row["block_size"], n, (1 << 53) + i)
            answer = Segment((1 << 54) + (i << 16) + k, output)
            think = min(float(turn["think_time"]), max_think_s) if k else 0.0
            turns.append(Turn(prompt, output, answer, think, "agent"))
        if turns:
            sessions.append(Session(0.0, tuple(turns)))
    Random(seed).shuffle(sessions)
    stage = Stage("agents", tuple(sessions), concurrency=concurrency)
    return Workload("agents", (stage,))


def message_trace(
    rows: Iterable[Mapping[str, Any]], *, concurrency: int, seed: int = 0, think_s: float = 1.0
) -> Workload:
    """tau-bench sessions {messages}: every assistant message is a request whose prompt is all before it.

    Tokens are estimated as characters / 4; equal texts are equal streams, so policies and user openings are shared.
    """
    sessions = []
    for row in rows:
        history: list[Segment] = []
        turns: list[Turn] = []
        for message in row["messages"]:
            text = repr(message.get("content")) + repr(message.get("tool_calls") or "")
            piece = Segment(_text_content(message["role"] + text), max(len(text) // 4, 1))
            if message["role"] == "assistant" and history:
                turns.append(Turn(tuple(history), piece.tokens, piece, think_s if turns else 0.0, "tau"))
            history.append(piece)
        if turns:
            sessions.append(Session(0.0, tuple(turns)))
    Random(seed).shuffle(sessions)
    return Workload("tau-bench", (Stage("tau-bench", tuple(sessions), concurrency=concurrency),))


def mixed(name: str, parts: Sequence[Workload]) -> Workload:
    """Single-stage open loops laid over each other."""
    sessions = sorted((s for w in parts for s in w.stages[0].sessions), key=lambda s: s.start_s)
    seconds = max(w.stages[0].seconds for w in parts)
    return _one_stage(name, sessions, sum(w.stages[0].rate_per_s for w in parts), seconds)


def shortened(built: Workload, share: float) -> Workload:
    """The first `share` of every stage: of its time, or of its sessions where they are not sent by time."""
    return built if share >= 1 else Workload(built.name, tuple(_shortened_stage(s, share) for s in built.stages))


def _shortened_stage(stage: Stage, share: float) -> Stage:
    if stage.concurrency is not None:
        kept = stage.sessions[: max(round(share * len(stage.sessions)), 1)]
    else:
        until_s = share * max(stage.seconds, max((s.start_s for s in stage.sessions), default=0.0))
        kept = tuple(s for s in stage.sessions if s.start_s <= until_s)
    return msgspec.structs.replace(stage, sessions=kept, seconds=share * stage.seconds)


def token_ids(prompt: Iterable[Segment], vocab_size: int = 30_000, first_id: int = 1000) -> list[int]:
    """The prompt spelt out. Equal slices of a stream give equal ids."""
    ids: list[int] = []
    for s in prompt:
        stream = Random(s.content).choices(range(first_id, first_id + vocab_size), k=s.start + s.tokens)
        ids += stream[s.start :]
    return ids


def words(prompt: Iterable[Segment]) -> str:
    """The prompt as text, one short word for each token; how many tokens it makes is the tokenizer's business."""
    return " ".join(_WORDS[i] for i in token_ids(prompt, vocab_size=len(_WORDS), first_id=0))


def block_hashes(
    prompt: Sequence[Segment], block_size_tokens: int, memo: dict[Any, tuple[list[int], int, int]] | None = None
) -> list[int]:
    """One 63-bit name for each full block; equal exactly when the block and all before it are equal.

    `memo` keeps the chains of prompts' beginnings (all but the last segment) from call to call.
    """
    hashes: list[int] = []
    digest, filled, done = 0, 0, 0
    if memo is not None:
        for cut in range(len(prompt), 0, -1):
            known = memo.get(tuple(prompt[:cut]))
            if known is not None:
                hashes, digest, filled, done = known[0][:], known[1], known[2], cut
                break
    for index in range(done, len(prompt)):
        content, tokens, start = prompt[index]
        position = 0
        if filled:
            position = min(block_size_tokens - filled, tokens)
            digest = hash((digest, content, start, position))
            filled = (filled + position) % block_size_tokens
            if not filled:
                hashes.append(digest & _MASK)
        whole_end = position + (tokens - position) // block_size_tokens * block_size_tokens
        for at in range(position, whole_end, block_size_tokens):
            digest = hash((digest, content, start + at, block_size_tokens))
            hashes.append(digest & _MASK)
        if whole_end > position or not filled:
            filled = max(tokens - whole_end, 0)
            if filled:
                digest = hash((digest, content, start + whole_end, filled))
        if memo is not None and index < len(prompt) - 1:
            memo[tuple(prompt[: index + 1])] = (hashes[:], digest, filled)
    return hashes


_MASK = (1 << 63) - 1
_WORDS = tuple(a + b for a in "bdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "ai", "ar", "en", "in", "on", "or"))


def _single(rng: Random, prompt: tuple[Segment, ...], output_tokens: int, group: str) -> Turn:
    return Turn(prompt, output_tokens, Segment(rng.getrandbits(60), output_tokens), group=group)


def _one_stage(name: str, sessions: Iterable[Session], rate: float, seconds: float) -> Workload:
    return Workload(name, (Stage(name, tuple(sessions), rate, seconds),))


def _runs(ids: Sequence[int], block: int, tokens: int, content: int) -> tuple[Segment, ...]:
    """Blocks of a trace as slices of one stream, runs of consecutive ids joined; cut or filled up to `tokens`."""
    segments: list[Segment] = []
    left = tokens
    for i in ids:
        n = min(block, left)
        if n <= 0:
            break
        left -= n
        last = segments[-1] if segments else None
        if last is not None and last.start + last.tokens == i * block:
            segments[-1] = Segment(content, last.tokens + n, last.start)
        else:
            segments.append(Segment(content, n, i * block))
    if left > 0 and segments:
        segments.append(Segment(hash((content, tuple(ids))) & _MASK, left))
    return tuple(segments)


def _text_content(text: str) -> int:
    """A stream number for a text; the same in every process."""
    n = 0
    for byte in text.encode():
        n = (n * 1_000_003 + byte) & _MASK
    return n
