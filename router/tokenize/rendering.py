"""A request body to ids, whichever endpoint it is for: the one place where refusals become reasons. CPU only.

May import: the standard library, msgspec, and this room but service.py, shelf.py and load.py.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from router.tokenize.chat import Unrenderable
from router.tokenize.model import ModelRenderer, Rendered, TextJob, completion
from router.tokenize.parting import Prompt, Render
from router.tokenize.port import NoTokens, PromptTokens
from router.tokenize.template import TemplateRefusal

ENDPOINTS: dict[str, Callable[[ModelRenderer, bytes], Rendered]] = {
    "/v1/chat/completions": ModelRenderer.chat,
    "/v1/completions": completion,
    "/v1/responses": ModelRenderer.responses,
    "/v1/messages": ModelRenderer.messages,
}


def render(renderer: ModelRenderer | NoTokens, endpoint: str, body: bytes) -> Rendered:
    """One request up to the point where its missing pieces must be encoded. Prompts given as ids need no tokenizer."""
    try:
        if endpoint == "/v1/completions":
            return completion(renderer, body)
        return renderer if isinstance(renderer, NoTokens) else ENDPOINTS[endpoint](renderer, body)
    except Unrenderable as exc:
        return NoTokens("unrenderable", str(exc))
    except TemplateRefusal as exc:
        return NoTokens("template_error", str(exc))
    except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as exc:
        # a body of unforeseen shape: the pod will refuse it, or it has a field we read too strictly; no reason to fail
        return NoTokens("unrenderable", f"unforeseen: {type(exc).__name__}")


def finish(job: TextJob) -> PromptTokens | NoTokens:
    """Encode what is missing. Never raises."""
    try:
        return job.finish()
    except Exception as exc:  # the library raises bare Exception, e.g. for a character its vocabulary lacks
        return NoTokens("tokenizer_failed", str(exc)[:200])


def render_fully(renderer: ModelRenderer | NoTokens, endpoint: str, body: bytes) -> PromptTokens | NoTokens:
    """The ids of one request, in whatever thread this runs."""
    rendered = render(renderer, endpoint, body)
    return finish(rendered) if isinstance(rendered, TextJob) else rendered


def renderer(model: ModelRenderer) -> Render:
    """Exact prompts. The returned function raises ValueError for a request that cannot be rendered."""

    def rendered(body: dict[str, Any]) -> Prompt:
        endpoint = _endpoint(body)
        found = render(model, endpoint, msgspec.json.encode(body))
        if isinstance(found, NoTokens):
            raise ValueError(f"cannot be rendered: {found.detail or found.reason}")
        if isinstance(found, TextJob):
            return Prompt(text=found.text, ids=found.finish().packed)
        assert isinstance(found, PromptTokens)
        return Prompt(text=" ".join(map(str, memoryview(found.packed).cast("I"))), ids=found.packed)

    return rendered


def _endpoint(body: dict[str, Any]) -> str:
    if "input" in body:
        return "/v1/responses"
    if "messages" in body:
        anthropic = "system" in body or any("input_schema" in t for t in body.get("tools") or [] if isinstance(t, dict))
        return "/v1/messages" if anthropic else "/v1/chat/completions"
    return "/v1/completions"
