"""vLLM's HTTP surface over an emulated pod, and the admin routes under /emulated.

Shapes follow vLLM 0.32 as recorded in tests/data/recorded.
May import: the standard library, aiohttp, msgspec, the rooms of loadtest.fleet.
"""

import asyncio
import itertools
import json
import socket
import struct
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from loadtest.fleet.faults import Fault
from loadtest.fleet.metrics import render
from loadtest.fleet.pod import EmulatedPod, Generation
from loadtest.fleet.text import BadMessages

POD: web.AppKey[EmulatedPod] = web.AppKey("pod", EmulatedPod)
REQUEST_MAX_BYTES = 64 << 20
_json = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class ApiError(Exception):
    """An OpenAI error object with its status."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def response(self, headers: Mapping[str, str] | None = None) -> web.Response:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return _reply({"error": error}, self.status, headers)


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A checked completion or chat request."""

    model: str
    chat: bool
    prompts: list[Sequence[int]]
    output_tokens: int
    natural_end: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    skip_cache_read: bool
    lora: str | None
    salt: str | None


def build_app(pod: EmulatedPod) -> web.Application:
    """The pod's application; run it with handler cancellation, so that a client that leaves aborts its request."""
    app = web.Application(client_max_size=REQUEST_MAX_BYTES, middlewares=[_errors])
    app[POD] = pod
    app.add_routes(
        [
            web.post("/v1/chat/completions", _chat),
            web.post("/v1/completions", _completions),
            web.get("/v1/models", _models),
            web.post("/tokenize", _tokenize),
            web.post("/detokenize", _detokenize),
            web.get("/metrics", _metrics),
            web.get("/health", _health),
            web.get("/ping", _health),
            web.get("/load", _load),
            web.get("/version", _version),
            web.get("/kv_event_sources", _kv_event_sources),
            web.post("/reset_prefix_cache", _reset_prefix_cache),
            web.post("/emulated/fault", _fault),
            web.get("/emulated/blocks", _blocks),
            web.get("/emulated/state", _state),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        reply: web.StreamResponse = await handler(request)
    except ApiError as exc:
        return exc.response()
    return reply


# ---- generation


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _generate(request, chat=True)


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, chat=False)


async def _generate(request: web.Request, *, chat: bool) -> web.StreamResponse:
    pod = request.app[POD]
    raw = await request.read()
    fault = pod.faults.draw()
    if fault.kind in ("500", "503", "shutdown", "hang") or (fault.kind == "reset" and not fault.after_tokens):
        return await _fail(request, fault)
    pod.open_requests += 1
    generations: list[Generation] = []
    try:
        ask = _read(pod, raw, chat=chat)
        for n, prompt in enumerate(ask.prompts):
            generations.append(_submit(pod, ask, prompt, seed=zlib.crc32(raw, n)))
        prefix = "chatcmpl-" if chat else "cmpl-"
        reply_id = prefix + (request.headers.get("X-Request-Id") or f"{next(_serial):016x}")
        if ask.stream:
            return await _stream(request, pod, ask, reply_id, generations, fault)
        return await _whole(request, pod, ask, reply_id, generations, fault)
    finally:
        pod.open_requests -= 1
        for g in generations:
            pod.abort(g)


_serial = itertools.count(1)


def _submit(pod: EmulatedPod, ask: Ask, prompt: Sequence[int], *, seed: int) -> Generation:
    try:
        return pod.submit(
            prompt,
            ask.output_tokens,
            seed=seed,
            lora_name=ask.lora,
            cache_salt=ask.salt,
            skip_cache_read=ask.skip_cache_read,
        )
    except ValueError as exc:
        raise bad_request(f"This pod cannot hold the request: {exc}") from exc


async def _whole(
    request: web.Request,
    pod: EmulatedPod,
    ask: Ask,
    reply_id: str,
    generations: Sequence[Generation],
    fault: Fault,
) -> web.StreamResponse:
    for g in generations:
        async for _ in _tokens(request, pod, g, fault):
            pass
    choices = [_whole_choice(pod, ask, n, g) for n, g in enumerate(generations)]
    body: dict[str, Any] = {
        "id": reply_id,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": "warmroute-emulated-pod",
        "usage": _usage(ask, generations),
    }
    if ask.chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": list(ask.prompts[0]) if ask.token_ids else None}
    return _reply(body)


def _whole_choice(pod: EmulatedPod, ask: Ask, index: int, g: Generation) -> dict[str, Any]:
    text = pod.text.words_text(g.output_ids)
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": _reason(ask), "stop_reason": None}
    choice["token_ids"] = list(g.output_ids) if ask.token_ids else None
    if ask.chat:
        return choice | {"message": {"role": "assistant", "content": text, "refusal": None, "reasoning": None}}
    return choice | {"text": text, "prompt_token_ids": list(ask.prompts[index]) if ask.token_ids else None}


async def _stream(
    request: web.Request,
    pod: EmulatedPod,
    ask: Ask,
    reply_id: str,
    generations: Sequence[Generation],
    fault: Fault,
) -> web.StreamResponse:
    reply = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await reply.prepare(request)
    kind = "chat.completion.chunk" if ask.chat else "text_completion"
    head = f'data: {{"id":{json.dumps(reply_id)},"object":"{kind}","created":{int(time.time())},'
    head += f'"model":{json.dumps(ask.model)},"choices":['
    choices = [
        _stream_one(reply, pod, ask, head, n, g, _tokens(request, pod, g, fault)) for n, g in enumerate(generations)
    ]
    if len(choices) == 1:
        await choices[0]
    else:
        await asyncio.gather(*choices)
    tail = b""
    if ask.include_usage:
        tail = f'{head}],"usage":'.encode() + _json(_usage(ask, generations)) + b"}\n\n"
    await reply.write(tail + b"data: [DONE]\n\n")
    await reply.write_eof()
    return reply


async def _stream_one(
    reply: web.StreamResponse,
    pod: EmulatedPod,
    ask: Ask,
    head: str,
    index: int,
    g: Generation,
    tokens: AsyncIterator[Sequence[int]],
) -> None:
    """Send one choice's chunks."""
    sent, prompt = 0, list(ask.prompts[index])
    async for ids in tokens:
        lines = []
        if not sent and ask.chat:
            first = '"logprobs":null,"finish_reason":null}]'
            given = f',"prompt_token_ids":{json.dumps(prompt)}' if ask.token_ids else ""
            lines.append(f'{head}{{"index":{index},"delta":{{"role":"assistant","content":""}},{first}{given}}}\n\n')
        before = sent
        sent += len(ids)
        ended = "null" if sent < len(g.output_ids) else f'"{_reason(ask)}"'
        text = pod.text.words_text(ids)
        body = f'"delta":{{"content":"{text}"}}' if ask.chat else f'"text":"{text}"'
        extra = ""
        if ask.token_ids:
            extra = f',"token_ids":{json.dumps(list(ids))}'
            if not ask.chat and not before:
                extra += f',"prompt_token_ids":{json.dumps(prompt)}'
        lines.append(
            f'{head}{{"index":{index},{body},"logprobs":null,"finish_reason":{ended},"stop_reason":null{extra}}}]}}\n\n'
        )
        await reply.write("".join(lines).encode())


async def _tokens(request: web.Request, pod: EmulatedPod, g: Generation, fault: Fault) -> AsyncIterator[Sequence[int]]:
    """The ids of one sequence as they come, as far as the fault in force lets them."""
    sent = 0
    async for ids in pod.tokens(g):
        yield ids
        sent += len(ids)
        if fault.after_tokens and sent >= fault.after_tokens:
            await _break_off(request, fault)


async def _fail(request: web.Request, fault: Fault) -> web.StreamResponse:
    if fault.kind == "500":
        return ApiError(500, "InternalServerError", "emulated fault").response()
    if fault.kind == "503":
        error = ApiError(503, "ServiceUnavailableError", "emulated fault: overloaded")
        return error.response({"Retry-After": f"{fault.retry_after_s:g}"})
    if fault.kind == "shutdown":
        return ApiError(500, "InternalServerError", "cannot schedule new futures after shutdown").response()
    return await _break_off(request, fault)


async def _break_off(request: web.Request, fault: Fault) -> NoReturn:
    """No byte more: the connection is reset, or stays open until the client leaves and the handler is cancelled."""
    if fault.kind == "reset":
        reset_connection(request.transport)
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def reset_connection(transport: asyncio.Transport | None) -> None:
    """Break a TCP connection so that the other side sees a reset, not an end."""
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _reason(ask: Ask) -> str:
    return "stop" if ask.natural_end else "length"


def _usage(ask: Ask, generations: Sequence[Generation]) -> dict[str, Any]:
    prompt = sum(len(p) for p in ask.prompts)
    output = sum(len(g.output_ids) for g in generations)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": sum(g.cached_tokens for g in generations)},
    }


# ---- reading a request


def _read(pod: EmulatedPod, raw: bytes, *, chat: bool) -> Ask:
    body = _body(raw)
    model = body.get("model", pod.config.model)
    lora = _known_model(pod, model)
    prompts = _chat_prompt(pod, body) if chat else _completion_prompts(pod, body)
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if body.get("n") not in (None, 1):
        raise bad_request("an emulated pod gives one answer: n must be 1", "n")
    longest = max(len(p) for p in prompts)
    output_tokens, natural_end = _output_tokens(pod, body, chat=chat, prompt_tokens=longest)
    options = body.get("stream_options") or {}
    return Ask(
        model=model,
        chat=chat,
        prompts=prompts,
        output_tokens=output_tokens,
        natural_end=natural_end,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        token_ids=bool(body.get("return_token_ids")),
        skip_cache_read=body.get("prompt_logprobs") is not None or bool(body.get("echo") and body.get("logprobs")),
        lora=lora,
        salt=salt,
    )


def _body(raw: bytes) -> dict[str, Any]:
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise bad_request(f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _known_model(pod: EmulatedPod, model: object) -> str | None:
    """The LoRA adapter that a model name means, None for the base model."""
    if model == pod.config.model:
        return None
    if isinstance(model, str) and model in pod.config.loras:
        return model
    raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def _chat_prompt(pod: EmulatedPod, body: Mapping[str, Any]) -> list[Sequence[int]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message", "messages")
    try:
        text = pod.text.chat(body)
    except BadMessages as exc:
        raise bad_request(str(exc), "messages") from exc
    return [pod.text.encode(text, add_special_tokens=bool(body.get("add_special_tokens")))]


def _completion_prompts(pod: EmulatedPod, body: Mapping[str, Any]) -> list[Sequence[int]]:
    prompt = body.get("prompt")
    special = bool(body.get("add_special_tokens", True))
    if isinstance(prompt, str) and prompt:
        return [pod.text.encode(prompt, add_special_tokens=special)]
    if isinstance(prompt, list) and prompt:
        if all(type(p) is int for p in prompt):
            return [_token_ids(pod, prompt)]
        if all(isinstance(p, str) and p for p in prompt):
            return [pod.text.encode(p, add_special_tokens=special) for p in prompt]
        if all(isinstance(p, list) and p for p in prompt):
            return [_token_ids(pod, p) for p in prompt]
    raise bad_request("prompt must be a string, a list of strings, token ids or a list of lists of token ids", "prompt")


def _token_ids(pod: EmulatedPod, ids: list[Any]) -> list[int]:
    if not all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        raise bad_request("token ids must be integers of at least 0", "prompt")
    return ids


def _output_tokens(pod: EmulatedPod, body: Mapping[str, Any], *, chat: bool, prompt_tokens: int) -> tuple[int, bool]:
    """How many tokens the answer will have, and whether it ends by itself."""
    limit = pod.config.profile.max_model_len_tokens
    room = limit - prompt_tokens
    if room < 1:
        text = f"This model's maximum context length is {limit} tokens. However, your prompt contains {prompt_tokens}"
        raise bad_request(f"{text} input tokens.", "input_tokens")
    asked = body.get("max_completion_tokens") if chat else None
    asked = body.get("max_tokens") if asked is None else asked
    if asked is not None and (type(asked) is not int or asked < 1):
        raise bad_request("max_tokens must be at least 1", "max_tokens")
    if asked is not None and asked > room:
        text = f"This model's maximum context length is {limit} tokens. However, you requested {asked} output tokens"
        raise bad_request(f"{text} and your prompt contains {prompt_tokens} input tokens.", "max_tokens")
    at_most = asked if asked is not None else (room if chat else min(16, room))
    if body.get("ignore_eos"):
        return at_most, False
    natural = max(pod.config.answer_tokens, int(body.get("min_tokens") or 0))
    return (natural, True) if natural < at_most else (at_most, False)


# ---- the rest of vLLM's surface


async def _models(request: web.Request) -> web.Response:
    c = request.app[POD].config
    base = {
        "id": c.model,
        "object": "model",
        "created": int(request.app[POD].life.started_unix_s),
        "owned_by": "vllm",
        "root": c.model,
        "parent": None,
        "max_model_len": c.profile.max_model_len_tokens,
        "permission": [],
    }
    loras = [{**base, "id": name, "root": name, "parent": c.model, "max_model_len": None} for name in c.loras]
    return _reply({"object": "list", "data": [base, *loras]})


async def _tokenize(request: web.Request) -> web.Response:
    pod = request.app[POD]
    body = _body(await request.read())
    _known_model(pod, body.get("model", pod.config.model))
    ids = (_chat_prompt if "messages" in body else _completion_prompts)(pod, body)[0]
    limit = pod.config.profile.max_model_len_tokens
    return _reply({"count": len(ids), "max_model_len": limit, "tokens": list(ids), "token_strs": None})


async def _detokenize(request: web.Request) -> web.Response:
    pod = request.app[POD]
    body = _body(await request.read())
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise bad_request("tokens must be a list of token ids", "tokens")
    return _reply({"prompt": pod.text.decode(_token_ids(pod, tokens))})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(text=render(request.app[POD]), content_type="text/plain", charset="utf-8")


async def _health(request: web.Request) -> web.Response:
    return web.Response(status=503 if request.app[POD].faults.fault.health else 200)


async def _load(request: web.Request) -> web.Response:
    return _reply({"server_load": request.app[POD].open_requests})


async def _version(request: web.Request) -> web.Response:
    return _reply({"version": "0.32.0+emulated"})


async def _kv_event_sources(request: web.Request) -> web.Response:
    publisher = request.app[POD].life.publisher
    if publisher is None:
        return _reply({})
    source = publisher.source()
    for name in ("endpoint", "replay_endpoint"):  # vLLM binds and shows a wildcard host
        if source[name] is not None:
            source[name] = f"tcp://*:{str(source[name]).rsplit(':', 1)[1]}"
    return _reply({"0": source})


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    return _reply({"success": request.app[POD].reset()})


# ---- admin


async def _fault(request: web.Request) -> web.Response:
    pod = request.app[POD]
    try:
        fault = msgspec.json.decode(await request.read(), type=Fault)
    except msgspec.DecodeError as exc:
        raise bad_request(f"no fault: {exc}") from exc
    pod.faults.set(fault)
    return _reply({"fault": msgspec.to_builtins(fault)})


async def _blocks(request: web.Request) -> web.Response:
    """What the pod's block pool holds, with the tokens of every block: the truth an index can be compared with."""
    pod = request.app[POD]
    blocks = [
        {
            "hash": h,
            "copies": copies,
            "parent": stored.parent if stored else None,
            "token_ids": list(stored.token_ids) if stored else None,
            "lora_name": stored.lora_name if stored else None,
            "cache_salt": stored.cache_salt if stored else None,
        }
        for h, (copies, stored) in pod.held().items()
    ]
    publisher = pod.life.publisher
    return _reply(
        {
            "block_size": pod.config.profile.block_size_tokens,
            "num_blocks": pod.config.profile.num_blocks,
            "next_seq": publisher.next_seq if publisher else None,
            "idle": pod.life.engine.next_step_s(0.0) is None,
            "blocks": blocks,
        }
    )


async def _state(request: web.Request) -> web.Response:
    pod = request.app[POD]
    return _reply(
        {
            "emulated": True,
            "profile": pod.config.profile.name,
            "calibrated": pod.config.profile.calibrated,
            "speed": pod.config.speed,
            "late_s": pod.take_late_s() / pod.config.speed,
            "fault_hits": pod.faults.hits,
        }
    )


def _reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_json(body), status=status, headers=headers, content_type="application/json")
