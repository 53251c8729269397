"""A request's place in line, from what its client sent."""

from __future__ import annotations

import pytest

from router.proxy.parse import Parsed, parse
from router.proxy.place import asking, priority
from router.waiting import Asking

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("header", "body", "meant"),
    [
        pytest.param(None, b"", 0, id="unset"),
        pytest.param(None, b',"priority":-3', -3, id="by body"),
        pytest.param(b"7", b',"priority":-3', 7, id="the header goes before the body, as in vLLM"),
        pytest.param(b" -7 ", b"", -7, id="signed, with blanks"),
        pytest.param(b"high", b',"priority":2', 2, id="no number: the body's, as in vLLM"),
        pytest.param(b"9" * 5000, b',"priority":2', 2, id="longer than any priority"),
        pytest.param(None, b',"priority":"2"', 0, id="vLLM will refuse it"),
        pytest.param(None, b',"priority":true', 0, id="true is no number"),
        pytest.param(None, b',"priority":1.5', 0, id="nor is a fraction"),
    ],
)
def test_priority_is_read_as_vllm_reads_it(header: bytes | None, body: bytes, meant: int) -> None:
    text = b'{"model":"m","messages":[]' + body + b"}"
    parsed = parse(CHAT, (), text, inflate_max_bytes=0, form_search_max_bytes=0)
    assert priority([] if header is None else [(b"X-Vllm-Priority", header)], parsed) == meant


@pytest.mark.parametrize(
    ("path", "parsed", "tenant_header", "place"),
    [
        pytest.param(CHAT, Parsed(model="m", stream=True), None, Asking(), id="in line, with everybody else"),
        pytest.param(CHAT, Parsed(model="m"), None, Asking(in_one_piece=True), id="no first token will be seen"),
        pytest.param(CHAT, Parsed(model="m", stream=True), "x-tenant", Asking(tenant=b"acme"), id="of a tenant"),
        pytest.param(CHAT, Parsed(model="m", stream=True), "x-team", Asking(tenant=None), id="of none"),
        pytest.param("/v1/embeddings", Parsed(model="m"), None, Asking(in_one_piece=True), id="prefill is all it does"),
        pytest.param("/tokenize", Parsed(model="m"), None, None, id="no prefill"),
        pytest.param("/v1/messages/count_tokens", Parsed(model="m"), None, None, id="none there either"),
        pytest.param("/v1/responses/resp_1", Parsed(), None, None, id="names no model: nothing to compute"),
    ],
)
def test_who_waits(path: str, parsed: Parsed, tenant_header: str | None, place: Asking | None) -> None:
    assert asking(path, [(b"X-Tenant", b"acme")], parsed, tenant_header=tenant_header) == place
