"""Pods by hand: SPEC = URL[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT][,ranks=N][,model=NAME]. Pure.

May import: the standard library, router.fleet.state.
"""

from urllib.parse import urlsplit

from router.fleet.state import PodSpec

_EXAMPLE = "http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558"


def normalise_url(url: str) -> str:
    """scheme://host:port[/path] in lower case, without a trailing slash: two spellings of one pod are one pod.

    Raises ValueError with the cure.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"pod URL {url!r} cannot be read: {exc}; give for example {_EXAMPLE}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"pod URL {url!r} must begin with http:// or https:// and name a host; for example {_EXAMPLE}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"pod URL of host {parts.hostname} may not hold credentials, a query or a fragment")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"pod URL {url!r}: leave /v1 out; the router adds the path of each request")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def parse_spec(text: str) -> PodSpec:
    """One SPEC. Raises ValueError with the cure."""
    url, *options = [part.strip() for part in text.split(",")]
    base = normalise_url(url)
    seen: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not value or name not in ("events", "replay", "ranks", "model") or name in seen:
            raise ValueError(
                f"--pod {text!r}: {option!r} is not understood; options: events=, replay=, ranks=, model=, each once, "
                f"for example {_EXAMPLE}"
            )
        seen[name] = value
    for name in ("events", "replay"):
        if name in seen:
            _check_zmq(name, seen[name])
    ranks = seen.get("ranks", "1")
    if not ranks.isdecimal() or not 1 <= int(ranks) <= 1024:
        raise ValueError(f"--pod {text!r}: ranks is {ranks!r}; it must be a number from 1 to 1024")
    return PodSpec(
        identity=base,
        name=base,
        url=base,
        events=seen.get("events"),
        replay=seen.get("replay"),
        ranks=int(ranks),
        model=seen.get("model"),
    )


def _check_zmq(name: str, endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("tcp", "ipc") and (parts.scheme == "ipc" or (parts.hostname and parts.port))
    except ValueError:
        good = False
    if not good or parts.hostname == "*":
        raise ValueError(
            f"{name}={endpoint} cannot be connected to; give the pod's own address as tcp://HOST:PORT "
            "(the `*` belongs into the pod's --kv-events-config, not here)"
        )


def parse_specs(texts: list[str]) -> list[PodSpec]:
    """All SPECs. Raises ValueError when one is bad or two name the same pod."""
    specs = [parse_spec(t) for t in texts]
    urls = [s.url for s in specs]
    doubles = sorted({u for u in urls if urls.count(u) > 1})
    if doubles:
        raise ValueError(f"--pod names {doubles[0]} twice; each pod is given once")
    return specs
