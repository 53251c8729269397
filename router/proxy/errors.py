"""Errors for clients: OpenAI error objects, each saying whose fault it is and what to do (DESIGN 14).

May import: aiohttp.web, router.door.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from router.door import error_object, error_type


class HttpError(Exception):
    """Ends a request with an error of ours. The message goes to the client, so it holds nothing it did not send."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.close = close  # the connection cannot be used further: the request's body was not read

    def response(self, endpoint: str = "") -> web.Response:
        """The reply to send, in the endpoint's own form."""
        headers: dict[str, str] = {"Content-Type": "application/json"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = error_object(self.status, self.message, code=self.code, param=self.param)
        if endpoint.startswith("/v1/messages"):  # Anthropic's clients look for `type` beside `error`
            body = b'{"type":"error",' + body[1:]
        response = web.Response(status=self.status, body=body, headers=headers)
        if self.close:
            response.force_close()
        return response


def stream_error_event(endpoint: str, message: str) -> bytes:
    """An error event in the endpoint's own form, for a stream that breaks after its head was sent (H03)."""
    if endpoint == "/v1/messages":
        body: Mapping[str, object] = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    if endpoint.startswith("/v1/responses"):
        body = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    error = {"message": message, "type": error_type(502), "param": None, "code": 502}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"
