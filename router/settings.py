"""Every knob, read once: flags > environment (WARMROUTE_*) > one YAML file (--config) > defaults.

Each field has its unit in its name, a default and its reason. `docs/configuration.md` is generated from this file.
May import: the standard library, pydantic, pydantic-settings, pyyaml.
"""

from __future__ import annotations

import argparse
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUseDefault
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)


class SettingsError(Exception):
    """A setting cannot be used; the text says which, why, and what to do."""


Many = Annotated[list[str], NoDecode]
"""Repeatable flag; in the environment several values are separated by white space."""


class _Base(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="WARMROUTE_", extra="forbid", frozen=True, yaml_file=None, env_ignore_empty=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = init_settings().get("config") or env_settings().get("config")
        sources: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        if path:
            Path(path).read_bytes()  # the YAML source would take a file that is not there for an empty one
            sources += (YamlConfigSettingsSource(settings_cls, yaml_file=path),)
        return sources

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        if isinstance(value, str) and info.field_name.endswith("port") and value.startswith(("tcp://", "udp://")):
            raise PydanticUseDefault  # Kubernetes' own WARMROUTE_PORT in the namespace of a Service called warmroute
        if isinstance(value, str) and typing.get_origin(field.annotation) is list:
            return value.split()
        return value


_NO_KEY = "is empty; give the key, or leave the setting out, which lets everybody in"

SECRETS = frozenset({"redis_url", "key_seed", "pod_api_key", "api_key"})
"""Never shown, not even when they are wrong: what is said of them ends in a log."""


def _plain_url(url: str) -> bool:
    """The parts of a URL are where they seem to be: a password's own / ? or # would end its host part too early."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return not parts.fragment and "@" not in parts.path + parts.query


class CommonSettings(_Base):
    """What `serve` and `index` share: where the pods are, where the index is."""

    config: Path | None = Field(None, description="YAML file with any of these settings, names with underscores")
    pod: Many = Field(
        default_factory=list,
        description="a pod: URL[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT][,ranks=N][,model=NAME]; repeatable",
    )
    redis_url: str | None = Field(
        None,
        description="shared index: redis://, rediss:// or unix://; without it the index lives in the router's memory",
    )
    key_seed: str = Field(
        "",
        description="secret of this installation that goes into every block key; the same for all routers and indexers",
    )
    block_size: int = Field(
        16, gt=0, description="tokens a KV block, used for a worker only until its events or metrics say otherwise"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_format: Literal["json", "text"] = Field("json", description="one JSON object a line, or text for people")
    admin_host: str = Field("127.0.0.1", description="address of the admin port (health, metrics, debug)")
    discovery: Literal["static", "kubernetes", "dns", "file"] = Field(
        "static", description="where pods come from: --pod, the Kubernetes API, a host name (--service), --pods-file"
    )
    pods_file: Path | None = Field(
        None, description="file with one SPEC a line, as after --pod, read again when it changes (file discovery)"
    )
    namespace: str | None = Field(None, description="namespace of the pods (kubernetes discovery); unset: our own")
    selector: str | None = Field(None, description="label selector of the pods, as kubectl takes it")
    service: str | None = Field(
        None,
        description="Service whose EndpointSlices list the pods, instead of a selector; host name with dns discovery",
    )
    pod_port: int | None = Field(
        None, gt=0, lt=65536, description="the pods' HTTP port; unset: the one named http, else 8000, else the first"
    )
    events_port: int | None = Field(None, gt=0, lt=65536, description="the pods' KV event port (ZMQ PUB), rank 0")
    replay_port: int | None = Field(
        None, gt=0, lt=65536, description="the pods' KV event replay port (ZMQ ROUTER), rank 0"
    )
    pod_ca: Path | None = Field(None, description="CA bundle (PEM) that signs the certificates of https pods")
    scrape_interval_s: float = Field(1.0, gt=0, description="how often a pod's /metrics are read")
    scrape_timeout_s: float = Field(
        5.0, gt=0, description="limit of one read; a slow one never takes a pod out of rotation"
    )
    scrape_stale_after_s: float = Field(
        10.0, gt=0, description="older figures are unknown: own bookings alone count then"
    )
    probe_timeout_s: float = Field(5.0, gt=0, description="limit of one /health or /v1/models probe")
    pod_api_key: str | None = Field(None, description="the pods' own --api-key, sent to them as a bearer token")

    @field_validator("redis_url", "pod_api_key", "key_seed", mode="before")
    @classmethod
    def _without_newline(cls, value: Any) -> Any:
        """A Secret made from a file ends with one, and it would go into a header."""
        return value.strip() if isinstance(value, str) else value

    @field_validator("pod_api_key")
    @classmethod
    def _fits_a_header(cls, value: str | None) -> str | None:
        if value is not None and not (value.isascii() and value.isprintable() and value):
            raise ValueError("must be printable ASCII in one line, since it is sent in a header")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        if value is not None and not _plain_url(value):
            raise ValueError("its user, password or host cannot be told apart; percent-encode / ? # @ [ in a password")
        return value


class ServeSettings(CommonSettings):
    """`warmroute serve`."""

    host: str = Field("0.0.0.0", description="address to listen on for clients")  # noqa: S104  pods are reached from outside
    port: int = Field(8080, ge=0, lt=65536, description="port for clients; 0: a free one, logged")
    admin_port: int = Field(9090, ge=0, lt=65536, description="admin port; 0: a free one, logged")
    admin_on_main: bool = Field(False, description="serve /debug/* on the client port too")
    policy: str = Field("prefix", description="how a pod is chosen; docs/policies.md lists the rules")
    allow_policy_header: bool = Field(False, description="let the request header x-warmroute-policy choose a policy")
    control: str | None = Field(
        None,
        description="POLICY:SHARE%, such as random:2%: a control group, to see what --policy gains on live traffic",
    )
    shadow: str | None = Field(
        None, description="a policy that decides too and is only counted, to see what it would gain before it serves"
    )
    decision_headers: bool = Field(
        False, description="put x-warmroute-* headers on replies: pod, policy, matched tokens, reason"
    )
    tokenizer: Many = Field(
        default_factory=list,
        description="MODEL=PATH_OR_ID: where a model's tokenizer is; repeatable; unset: the model's own root or name,"
        " from the hub unless HF_HUB_OFFLINE=1",
    )
    chat_template: Many = Field(
        default_factory=list,
        description="MODEL=FILE: the template the pods got by --chat-template; MODEL * is every model; repeatable",
    )
    chat_template_kwargs: Many = Field(
        default_factory=list,
        description="MODEL=JSON: the pods' --default-chat-template-kwargs; MODEL * is every model; repeatable",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto", description="as the pods' flag of this name: how templates read message content"
    )
    trust_request_chat_template: bool = Field(
        False, description="as the pods' flag of this name: render a chat_template that comes in a request"
    )
    exclude_tools_when_tool_choice_none: bool = Field(False, description="as the pods' flag of this name")
    token_cache_max_bytes: int = Field(
        128 << 20,
        gt=0,
        description="of remembered pieces of prompts and their ids, per tokenizer; 75 KB a 7k-token chat",
    )
    ask_pod_tokenize: bool = Field(
        True, description="ask a pod's /tokenize for prompts that cannot be rendered here, and to compare a sample"
    )
    compare_tokens_one_in: int = Field(
        200, ge=0, description="prompts of which one is compared with a pod's own ids; 0: never"
    )
    pod_tokens_when_suspect: bool = Field(
        False, description="ask the pods for all prompts of a model whose ids keep differing from theirs"
    )
    index_deadline_ms: float = Field(
        20.0, gt=0, description="limit of a lookup in Redis; after it the local view alone decides"
    )
    exchange_ms: float = Field(
        100.0,
        ge=0,
        le=2000,
        description="how often routers of one --redis-url tell each other their load and choices; 0: never",
    )
    prefill_tokens_per_s: float = Field(20_000.0, gt=0, description="R: a pod's prefill rate before it is learnt")
    lora_load_s: float = Field(
        0.5, ge=0, description="a LoRA adapter's way onto a pod's GPU (a small one from a local disk); 0: not looked at"
    )
    local_ttl_s: float = Field(
        30.0, gt=0, description="how long a routed prefix counts before events or a first token confirm it"
    )
    local_ttl_no_events_s: float = Field(600.0, gt=0, description="the same for pods that publish no events")
    tokenize_deadline_s: float = Field(
        2.0, gt=0, description="limit of tokenizing one prompt; after it the approximate chain decides"
    )
    drain_s: float = Field(30.0, ge=0, description="after SIGTERM: how long streams may still run")
    drain_delay_s: float = Field(
        1.0, ge=0, description="after SIGTERM: how long the port stays open at least, for load balancers to see /ready"
    )
    api_key: Many = Field(
        default_factory=list,
        description="key that clients must send as a bearer token; repeatable; unset: no key is asked",
    )
    tenant_header: str | None = Field(
        None,
        description="request header that names the tenant, set by your gateway; authorization: by API key",
    )
    tenant_salt: bool = Field(
        False, description="keep the tenants' caches in vLLM apart: put a cache_salt made of the tenant into bodies"
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM) of the client port; with --tls-key")
    tls_key: Path | None = Field(None, description="private key (PEM) of the client port")

    # what clients may send
    request_max_bytes: int = Field(
        128 << 20, gt=0, description="longest request body; inline images reach tens of megabytes"
    )
    request_header_max_bytes: int = Field(
        65536, ge=1024, description="longest header line; JWTs pass 8 KiB. All of them together: four times that"
    )
    request_headers_max: int = Field(256, gt=0, description="most header lines of a request")
    request_head_limit_s: float = Field(30.0, gt=0, description="from the first byte to the end of a request's head")
    request_body_idle_limit_s: float = Field(60.0, gt=0, description="longest silence while a body is being sent")
    client_idle_limit_s: float = Field(75.0, gt=0, description="idle keep-alive; above a load balancer's usual 60 s")
    client_stall_limit_s: float = Field(300.0, gt=0, description="longest time a client may not read its reply")
    connections_per_client: int = Field(0, ge=0, description="open connections from one address; 0: no limit")
    connections_max: int = Field(20_000, gt=0, description="open client connections in all")
    buffered_bodies_max_bytes: int = Field(2 << 30, gt=0, description="request bodies held at one time, all together")
    inflate_max_bytes: int = Field(
        64 << 20, gt=0, description="of a compressed body, inflated for routing; beyond: by load"
    )
    multipart_search_max_bytes: int = Field(8 << 20, gt=0, description="where the model field of a form is looked for")

    # what pods may do
    connect_limit_s: float = Field(3.0, gt=0, description="to connect to a pod")
    first_byte_limit_s: float = Field(
        1800.0, gt=0, description="to a reply's first byte; prefills of ten minutes must live"
    )
    idle_limit_s: float = Field(600.0, gt=0, description="longest silence inside a reply")
    gone_limit_s: float = Field(2.0, gt=0, description="the same for a pod that is known to be gone")
    reply_header_max_bytes: int = Field(65536, ge=1024, description="longest header line of a pod's reply")
    pod_keepalive_s: float = Field(4.0, gt=0, description="idle connection to a pod; below the pod's own 5 s")

    # when every pod has enough to do
    overload_prefill_s: float = Field(
        0.0,
        ge=0,
        description="hold requests while every pod that may get them has more seconds of prefill booked; 0: pods queue",
    )
    overload_wait_s: float = Field(
        10.0, ge=0, description="longest wait for room, then 429 with Retry-After; 0: 429 at once"
    )
    overload_queue_requests: int = Field(
        1000, gt=0, description="requests that wait at one time; beyond: 429 for the last in line"
    )

    # trying again
    retry_attempts: int = Field(4, gt=0, description="attempts of one request, the first included")
    retry_budget_ratio: float = Field(
        0.2, ge=0, description="retries per request, so that a sick fleet is not multiplied"
    )
    retry_reserve: int = Field(20, ge=0, description="retries at hand with no traffic before them")
    retry_ambiguous: bool = Field(
        True, description="retry once after a reset of a reused idle connection, which cannot be told from a lost reply"
    )

    # what we say
    retry_after_s: int = Field(1, ge=0, description="Retry-After of our own 429 and 503")
    forward_authorization: bool | None = Field(
        None, description="pass the client's Authorization on to pods; unset: only when no --api-key is set"
    )
    forward_control_routes: bool = Field(
        False, description="pass on routes that act on one pod, such as /sleep and /reset_prefix_cache"
    )
    stream_comment_interval_s: float = Field(
        0.0, ge=0, description="SSE comments before a stream's first byte, for load balancers that cut silence; 0: none"
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _some_key(cls, value: Any) -> Any:
        """An unset $KEY must not open the door to everybody."""
        if isinstance(value, str) and not value.strip():
            raise ValueError(_NO_KEY)
        if isinstance(value, list) and not all(str(key).strip() for key in value):
            raise ValueError(_NO_KEY)
        return value

    @field_validator("tenant_header")
    @classmethod
    def _header_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", value):
            raise ValueError("must be the name of a header, such as x-tenant")
        return value.lower() if value is not None else None


class IndexSettings(CommonSettings):
    """`warmroute index`."""

    admin_port: int = Field(9091, ge=0, lt=65536, description="admin port; 0: a free one, logged")
    check: bool = Field(
        False,
        description="compare the index with what the pods hold, print it, and exit: 0 when they are equal, 1 when"
        " something differs, 3 when it could not be compared",
    )


def add_flags(parser: argparse.ArgumentParser, model: type[_Base]) -> None:
    """One flag a field: --kebab-case, help from the description, repeatable for lists, --x/--no-x for booleans."""
    for name, field in model.model_fields.items():
        flag = "--" + name.replace("_", "-")
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, [], "") else f" (default: {default})"
        meta = _metavar(name, field)
        text = f"{field.description}{shown}".replace("%", "%%")
        kind = _plain(field.annotation)
        if kind is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif typing.get_origin(kind) is list:
            parser.add_argument(flag, dest=name, action="append", default=None, metavar=meta, help=text)
        else:
            parser.add_argument(flag, dest=name, default=None, metavar=meta, help=text)


_METAVARS = {
    "pod": "SPEC",
    "control": "POLICY:SHARE%",
    "shadow": "POLICY",
    "tokenizer": "MODEL=PATH_OR_ID",
    "chat_template": "MODEL=FILE",
    "chat_template_kwargs": "MODEL=JSON",
}
_UNITS = {"s": "SECONDS", "ms": "MILLISECONDS", "bytes": "BYTES"}


def _metavar(name: str, field: FieldInfo) -> str:
    """What stands after a flag in its help: a unit, the kind of value, or the choices."""
    if name in _METAVARS:
        return _METAVARS[name]
    if chosen := choices(field):
        return "{" + ",".join(chosen) + "}"
    kind, last = _plain(field.annotation), name.rsplit("_", 1)[-1]
    if kind in (int, float):
        return "PORT" if last == "port" else "N" if "_per_" in name else _UNITS.get(last, "N")
    return "FILE" if kind is Path else last.upper()


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The only values a setting may have; () when it is free."""
    kind = _plain(field.annotation)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _plain(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


_Settings = typing.TypeVar("_Settings", bound=_Base)


def read(model: type[_Settings], flags: dict[str, Any]) -> _Settings:
    """Settings from parsed flags (None = not given), environment and file. Raises SettingsError with the cure."""
    given = {k: v for k, v in flags.items() if v is not None and k in model.model_fields}
    try:
        settings = model(**given)
        if isinstance(settings, ServeSettings) and not settings.api_key and "api_key" in _environment(os.environ):
            raise SettingsError(f"WARMROUTE_API_KEY: {_NO_KEY}")  # an empty variable counts as not given elsewhere
        return settings
    except ValidationError as exc:
        lines = []
        for error in exc.errors():
            name = str(error["loc"][0]) if error["loc"] else "settings"
            flag = "--" + name.replace("_", "-")
            if error["type"] == "extra_forbidden":
                lines.append(f"{name} in the settings file is no setting of this command; see docs/configuration.md")
                continue
            says = error["msg"].removeprefix("Value error, ")
            got = "" if name in SECRETS else f", got {_short(error.get('input'))}"
            lines.append(f"{flag} (or WARMROUTE_{name.upper()}): {says}{got}")
        raise SettingsError("\n".join(lines)) from exc
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise SettingsError(f"the settings file cannot be read as YAML with one NAME: VALUE a line: {exc}") from exc


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What is there under our prefix, by setting; case does not matter, as for pydantic."""
    prefix = "warmroute_"
    return {name.lower()[len(prefix) :]: name for name in environ if name.lower().startswith(prefix)}


_ONLY_WITH = {
    "overload_wait_s": "overload_prefill_s",
    "overload_queue_requests": "overload_prefill_s",
    "exchange_ms": "redis_url",
    "index_deadline_ms": "redis_url",
}
"""Settings that say how, and the one that says whether at all."""


_KUBERNETES_OWN = re.compile(r"(^|_)service_(host|port)|(^|_)port_\d+_(tcp|udp)|=(tcp|udp)://")
"""What it sets in the namespace of a Service whose name begins with warmroute."""


def unread(settings: CommonSettings, environ: Mapping[str, str]) -> list[str]:
    """What was given and has no effect, in words for the log."""
    known = ServeSettings.model_fields.keys() | IndexSettings.model_fields.keys()  # one environment may serve both
    told = []
    for name, variable in sorted(_environment(environ).items()):
        if name not in known and not _KUBERNETES_OWN.search(f"{name}={environ[variable]}"):
            close = get_close_matches(name, known, n=1)
            meant = f"did you mean WARMROUTE_{close[0].upper()}?" if close else "docs/configuration.md lists all"
            told.append(f"{variable} in the environment is no setting and is not read; {meant}")
    for name, needed in _ONLY_WITH.items():
        if name in settings.model_fields_set and getattr(settings, name) and not getattr(settings, needed):
            told.append(f"--{name} is not read without --{needed}".replace("_", "-"))
    return told


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def pairs(values: Sequence[str], flag: str) -> dict[str, str]:
    """["A=B", ...] as a mapping. Raises SettingsError when one has no `=`."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, right = value.partition("=")
        if not equals or not name or not right:
            raise SettingsError(f"{flag} {value!r} must be {_METAVARS.get(flag[2:].replace('-', '_'), 'NAME=VALUE')}")
        found[name] = right
    return found
