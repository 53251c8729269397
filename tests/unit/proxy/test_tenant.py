"""Who sent it, and the salt that keeps tenants apart, without a socket."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.proxy.errors import HttpError
from router.proxy.explained import explain_request
from router.proxy.limits import ProxyLimits
from router.proxy.parse import parse
from router.proxy.tenant import Salted, salted, tenant_of, tenant_salt, with_salt

CHAT = "/v1/chat/completions"
A, B = [(b"x-tenant", b"a")], [(b"x-tenant", b"b")]


@pytest.mark.parametrize(
    ("name", "headers", "tenant"),
    [
        pytest.param(b"x-tenant", [(b"X-Tenant", b" acme ")], b"acme", id="by header"),
        pytest.param(b"x-tenant", [(b"x-other", b"acme")], None, id="absent"),
        pytest.param(b"x-tenant", [(b"x-tenant", b"  ")], None, id="empty"),
        pytest.param(b"x-tenant", [(b"x-tenant", b"a"), (b"X-TENANT", b"a")], b"a", id="twice the same"),
        pytest.param(b"x-tenant", [(b"x-tenant", b"a"), (b"x-tenant", b"b")], None, id="two are none"),
        pytest.param(b"authorization", [(b"Authorization", b"Bearer k1")], b"k1", id="the key is the tenant"),
        pytest.param(b"authorization", [(b"x-api-key", b"k1")], b"k1", id="the key as Anthropic's clients send it"),
        pytest.param(b"x-api-key", [(b"Authorization", b"bearer k1")], b"k1", id="either name means both headers"),
        pytest.param(b"authorization", [(b"authorization", b"Basic Zm9v")], None, id="no key in it"),
        pytest.param(
            b"authorization", [(b"authorization", b"Bearer k1"), (b"x-api-key", b"k2")], None, id="two keys are none"
        ),
    ],
)
def test_which_tenant(name: bytes, headers: list[tuple[bytes, bytes]], tenant: bytes | None) -> None:
    assert tenant_of(headers, name) == tenant


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.text(max_size=8) | st.just("cache_salt"), json_values, max_size=4),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.text(" \t\r\n", max_size=80),
)
def test_the_salt_is_the_last_word_and_no_other_byte_changes(
    body: dict, ascii_only: bool, indent: int | None, space: str
) -> None:
    text = (space + json.dumps(body, ensure_ascii=ascii_only, indent=indent) + space).encode("utf-8", "surrogatepass")
    out = with_salt(text, "0123")
    assert json.loads(out)["cache_salt"] == "0123"
    field = b'"cache_salt":"0123"' if not body else b',"cache_salt":"0123"'
    assert out.replace(field, b"") == text or body.get("cache_salt") == "0123"
    assert repr({**json.loads(text), "cache_salt": 0}) == repr({**json.loads(out), "cache_salt": 0})  # NaN has no equal


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_body_in_any_encoding_that_vllm_reads_gets_its_salt(encoding: str) -> None:
    out = with_salt('{"model":"m","prompt":"für}"}'.encode(encoding), "0123")
    assert json.loads(out) == {"model": "m", "prompt": "für}", "cache_salt": "0123"}


def read(
    body: bytes, *headers: tuple[bytes, bytes], endpoint: str = CHAT, name: bytes = b"x-tenant", seed: str = "secret"
) -> Salted | None:
    parsed = parse(endpoint, headers, body, inflate_max_bytes=10_000, form_search_max_bytes=10_000, thorough=True)
    return salted(endpoint, headers, parsed, name=name, seed=seed)


def salt(body: dict, *headers: tuple[bytes, bytes], seed: str = "secret") -> str:
    marked = read(json.dumps({"model": "m", **body}).encode(), *headers, seed=seed)
    assert marked is not None
    assert marked.parsed.cache_salt == json.loads(marked.body)["cache_salt"]
    return json.loads(marked.body)["cache_salt"]


def test_tenants_are_apart_whatever_salt_they_send_themselves() -> None:
    of_b = salt({}, *B)
    salts = {salt({}, *A), of_b, salt({"cache_salt": "s"}, *A), salt({"cache_salt": "s"}, *B)}
    salts |= {salt({"cache_salt": of_b}, *A), salt({"cache_salt": "/s"}, *A), salt({}, (b"x-tenant", b"a/s"))}
    assert len(salts) == 7
    assert salt({"cache_salt": ""}, *A) == salt({"cache_salt": None}, *A) == salt({}, *A)


def test_the_salt_is_made_by_the_seed_shows_no_tenant_and_is_one_that_vllm_takes() -> None:
    key = b"sk-a-secret-key"
    made = tenant_salt("secret", key, None)
    assert made != tenant_salt("another", key, None)
    assert made == tenant_salt("secret", key, None)  # every router, every start
    assert key.decode() not in made
    assert 1 <= len(made) <= 128
    assert not set(made) & set("@/\\\0")


@pytest.mark.parametrize(
    ("headers", "name", "status"),
    [
        pytest.param([], b"x-tenant", 400, id="no header"),
        pytest.param([*A, *B], b"x-tenant", 400, id="two tenants"),
        pytest.param([], b"authorization", 401, id="no key"),
        pytest.param([*A, (b"content-encoding", b"br")], b"x-tenant", 400, id="a coding that is not read here"),
        pytest.param([*A, (b"content-encoding", b"gzip")], b"x-tenant", 400, id="no gzip although it says so"),
    ],
)
def test_who_cannot_be_told_apart_is_refused(headers: list[tuple[bytes, bytes]], name: bytes, status: int) -> None:
    with pytest.raises(HttpError) as refused:
        read(b'{"input": 1}', *headers, name=name, endpoint="/pooling")
    assert refused.value.status == status


@pytest.mark.parametrize("endpoint", ["/cohere/v2/chat", "/v2/embed"])
def test_a_route_that_takes_no_salt_is_refused(endpoint: str) -> None:
    with pytest.raises(HttpError) as refused:
        read(b'{"model": "m"}', *A, endpoint=endpoint)
    assert refused.value.status == 403


@pytest.mark.parametrize("body", [b"[1]", b"\x00\x01", b"--B\r\n\r\n{}", b"{not json}"])
def test_what_is_no_json_object_passes(body: bytes) -> None:
    assert read(body, *A, endpoint="/v1/audio/transcriptions") is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b" " * 100 + b"{}", id="far in"),
        pytest.param('{"a": 1}'.encode("utf-16"), id="utf-16"),
        pytest.param(b'\xef\xbb\xbf{"a": NaN}', id="a byte order mark, and NaN"),
    ],
)
def test_an_object_on_any_route_is_found_however_it_is_written(body: bytes) -> None:
    marked = read(body, *A, endpoint="/v1/chat/completions/batch")
    assert marked is not None
    assert json.loads(marked.body)["cache_salt"] == tenant_salt("secret", b"a", None)


def test_a_compressed_body_goes_on_inflated() -> None:
    headers = [(b"Content-Type", b"application/json"), (b"Content-Encoding", b"gzip"), *A]
    marked = read(gzip.compress(b'{"model":"m"}'), *headers)
    assert marked is not None
    assert marked.headers == [(b"Content-Type", b"application/json"), *A]
    assert marked.body == b'{"model":"m","cache_salt":"%b"}' % tenant_salt("secret", b"a", None).encode()


def test_explain_looks_where_the_tenants_blocks_are() -> None:
    limits = ProxyLimits(tenant_header="x-tenant", tenant_salt=True, key_seed="secret")
    asked = explain_request(CHAT, A, b'{"model":"m"}', limits=limits)
    assert asked.cache_salt == tenant_salt("secret", b"a", None)
    with pytest.raises(ValueError, match="x-tenant is needed"):
        explain_request(CHAT, (), b'{"model":"m"}', limits=limits)
