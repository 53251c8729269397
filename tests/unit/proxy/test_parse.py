"""Bodies and headers, without a socket."""

from __future__ import annotations

import gzip
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.door import ApiKeys, Unusable, error_object
from router.proxy.errors import HttpError, stream_error_event
from router.proxy.explained import explain_request, guess_endpoint
from router.proxy.handlers import origin_form
from router.proxy.headers import header_safe, is_event_stream, request_id, to_client, to_pod
from router.proxy.parse import form_model, inflate, parse
from router.proxy.record import route_label
from router.proxy.sticky import ResponseHomes, find_response_id

CHAT = "/v1/chat/completions"


def read(body: bytes, *headers: tuple[bytes, bytes], endpoint: str = CHAT):  # type: ignore[no-untyped-def]
    return parse(endpoint, headers, body, inflate_max_bytes=10_000, form_search_max_bytes=10_000)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=5), st.text(min_size=1, max_size=20), st.booleans())
def test_what_pythons_json_reads_is_read(rest: dict, model: str, ascii_only: bool) -> None:
    body = json.dumps({**rest, "model": model}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert read(body).model == json.loads(body)["model"]


@given(st.binary(max_size=100))
def test_any_bytes_are_a_model_or_a_400(body: bytes) -> None:
    status = 200
    try:
        read(body)
    except HttpError as exc:
        status = exc.status
    assert status == 400 or b"model" in body


@pytest.mark.parametrize(
    ("endpoint", "fields", "skips"),
    [
        (CHAT, {}, False),
        (CHAT, {"prompt_logprobs": 0}, True),
        (CHAT, {"logprobs": True, "top_logprobs": 5}, False),
        (CHAT, {"echo": True}, True),  # top_logprobs is 0 unless given, and 0 is not None
        (CHAT, {"echo": True, "top_logprobs": None}, False),
        ("/v1/completions", {"prompt_logprobs": 5}, True),
        ("/v1/completions", {"echo": True}, False),
        ("/v1/completions", {"echo": True, "logprobs": 0}, True),
        ("/v1/completions", {"echo": False, "logprobs": 2}, False),
    ],
)
def test_which_requests_read_nothing_from_the_cache(endpoint: str, fields: dict, skips: bool) -> None:
    """Read from vLLM 0.32: chat_completion/protocol.py:742, completion/protocol.py:373, sampling_params.py:622."""
    assert read(json.dumps({"model": "m", **fields}).encode(), endpoint=endpoint).skips_cache is skips


@given(st.binary(max_size=2000))
def test_inflating_gives_the_text_or_nothing(text: bytes) -> None:
    packed = gzip.compress(text)
    assert inflate(b"gzip", packed, max_bytes=2000) == text
    assert inflate(b"gzip", packed[:-4], max_bytes=2000) is None
    assert inflate(b"GZIP", packed, max_bytes=2000) == text
    assert inflate(b"gzip", packed + packed, max_bytes=2000) is None
    assert inflate(None, packed, max_bytes=1) == packed
    assert inflate(b"zstd", packed, max_bytes=2000) is None
    if text:
        assert inflate(b"gzip", packed, max_bytes=max(len(text) - 1, 1)) is None or len(text) == 1


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B--\r\n', "m"),
        (b"--B\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n--B--\r\n", "m"),
        (b'--B\r\nContent-Type: text/plain\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B--', "m"),
        (b'preamble\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B--\r\n', "m"),
        (b'--B\r\nContent-Disposition: form-data; name="model2"\r\n\r\nm\r\n--B--\r\n', None),
        (b'--B\r\nContent-Disposition: form-data; name="x"\r\n\r\nname="model"\r\n--B--\r\n', None),
        (b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm', None),  # cut by the bound
        (b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + b"m" * 5000 + b"\r\n--B--\r\n", None),
        (b"--B\r\nno end of head", None),
        (b"", None),
    ],
)
def test_the_model_field_of_a_form(body: bytes, model: str | None) -> None:
    assert form_model(kind_raw=b"multipart/form-data; boundary=B", body=body) == model


@pytest.mark.parametrize(
    "head", [b"content-disposition: " * 40_000, b"content-disposition: x" + b";" * 800_000, b"a\r\n" * 300_000]
)
def test_no_form_holds_everybody_up(head: bytes) -> None:
    """One of 800 KB took three minutes, in which nobody else was served."""
    began_s = time.monotonic()
    assert (
        form_model(kind_raw=b"multipart/form-data; boundary=B", body=b"--B\r\n" + head + b"\r\n\r\nm\r\n--B--") is None
    )
    assert time.monotonic() - began_s < 2.0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_form_without_trouble(body: bytes) -> None:
    form_model(kind_raw=b"multipart/form-data; boundary=B", body=b"--B\r\n" + body)


def test_what_debug_route_takes_a_body_for() -> None:
    assert guess_endpoint(b'{"messages":[]}') == CHAT
    assert guess_endpoint(b'{"input":1}') == "/v1/responses"
    assert guess_endpoint(b"???") == "/v1/completions"
    with pytest.raises(Unusable, match="model") as refused:
        explain_request(None, (), b'{"messages":[]}')
    assert refused.value.param == "model"
    with pytest.raises(Unusable, match="not valid JSON") as refused:
        explain_request(None, (), b"{")
    assert refused.value.code == "invalid_body"


def test_an_empty_model_is_none_where_none_is_needed() -> None:
    assert read(b'{"model":""}', endpoint="/tokenize").model is None
    assert read(b'{"model":""}').model == ""
    form = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n \r\n--B--'
    assert form_model(kind_raw=b"multipart/form-data; boundary=B", body=form) is None


@pytest.mark.parametrize(
    ("target", "form"),
    [
        ("/a?b", "/a?b"),
        ("http://h:1/a?b", "/a?b"),
        ("https://h", "/"),
        ("*", "*"),
        ("/a?u=http://x/", "/a?u=http://x/"),
    ],
)
def test_origin_form(target: str, form: str) -> None:
    assert origin_form(target) == form


def test_route_labels_are_a_closed_set() -> None:
    assert route_label("/v1/chat/completions") == CHAT
    assert route_label("/v1/responses/resp_1/cancel") == "/v1/responses/{id}"
    assert route_label("/v1/models/a/b") == "/v1/models/{id}"
    assert route_label("/anything") == "other"


@pytest.mark.parametrize(
    ("given_id", "taken"), [(b"abc-1", True), (b"", False), (b"a b", False), (b"\xff", False), (b"x" * 257, False)]
)
def test_which_request_ids_are_taken_over(given_id: bytes, taken: bool) -> None:
    assert request_id([(b"X-Request-ID", given_id)], "fresh") == (given_id if taken else b"fresh")


def test_connection_names_more_hop_by_hop_headers() -> None:
    got = to_pod(
        [(b"Connection", b"close, X-A"), (b"x-a", b"1"), (b"x-b", b"2")],
        request_id=b"i", client=None, scheme=b"http", authorization=True, rank=2,
    )  # fmt: skip
    assert got == [
        (b"x-b", b"2"),
        (b"X-Forwarded-Proto", b"http"),
        (b"X-Request-Id", b"i"),
        (b"X-data-parallel-rank", b"2"),
    ]


def test_a_pod_cannot_speak_in_our_name() -> None:
    got = to_client(
        [(b"X-Warmroute-Pod", b"me")], request_id=b"i", ours=[(b"x-warmroute-pod", b"p")], event_stream=False
    )
    assert got == [(b"X-Request-Id", b"i"), (b"x-warmroute-pod", b"p")]


@pytest.mark.parametrize(
    ("location", "passed"),
    [
        (b"http://10.0.0.1:8000/base/v1/models?x=1", b"/v1/models?x=1"),
        (b"HTTPS://10.0.0.1:8000/base", b"/"),
        (b"http://10.0.0.1:8000/base?x", b"/?x"),
        (b"http://10.0.0.1:8000/basement", b"http://10.0.0.1:8000/basement"),
        (b"http://10.0.0.1:80001/base/", b"http://10.0.0.1:80001/base/"),
        (b"http://elsewhere/base/", b"http://elsewhere/base/"),
        (b"ftp://10.0.0.1:8000/base/", b"ftp://10.0.0.1:8000/base/"),
        (b"/v1/models", b"/v1/models"),
    ],
)
def test_where_a_pods_redirect_leads(location: bytes, passed: bytes) -> None:
    got = to_client([(b"Location", location)], request_id=b"i", event_stream=False, pod_url="http://10.0.0.1:8000/base")
    assert got[0] == (b"Location", passed)


def test_small_things() -> None:
    assert is_event_stream([(b"Content-Type", b"Text/Event-Stream; charset=utf-8")])
    assert not is_event_stream([(b"Content-Type", b"text/event-stream2")])
    assert header_safe("a\r\nb\xe9") == b"a??b?"
    assert json.loads(error_object(404, "no"))["error"] == {
        "message": "no", "type": "not_found_error", "param": None, "code": 404,
    }  # fmt: skip
    assert stream_error_event("/v1/messages", "x").startswith(b"event: error\ndata: {")


def test_keys() -> None:
    assert ApiKeys().admits([])
    keys = ApiKeys(["one", "two", ""])
    assert keys.admits([(b"Authorization", b"Bearer two")])
    assert keys.admits([(b"X-API-Key", b"one")])
    assert not keys.admits([(b"Authorization", b"Bearer ")])
    assert not keys.admits([(b"Authorization", b"two")])
    assert not keys.admits([])


def test_homes_of_stored_responses_are_bounded() -> None:
    homes = ResponseHomes(size=2)
    for name in ("a", "b"):
        homes.remember(name, "pod-" + name)
    assert homes.home("a") == "pod-a"  # used: "b" is the oldest now
    homes.remember("c", "pod-c")
    assert [homes.home(n) for n in "abc"] == ["pod-a", None, "pod-c"]
    assert find_response_id(b'{"object":"response","id" : "resp_1"') == "resp_1"
    assert find_response_id(b'{"id":"resp_unfini') is None
