"""Canonical bytes of a prompt whose ids cannot be had."""

import json

from router.tokenize.approximate import WHOLE_MAX_BYTES, canonical_prompt

CHAT = "/v1/chat/completions"


def chat(*contents: str, **more: object) -> bytes:
    return json.dumps({**more, "messages": [{"role": "user", "content": c} for c in contents]}).encode()


def test_what_does_not_belong_to_the_prompt_changes_nothing_and_a_further_message_only_appends() -> None:
    first = canonical_prompt(CHAT, chat("a", "b", temperature=0.5), "salt")
    assert first == canonical_prompt(CHAT, chat("a", "b", temperature=1.0), "salt")
    assert canonical_prompt(CHAT, chat("a", "b", "c"), "salt").startswith(first)
    assert canonical_prompt(CHAT, chat("a", "b"), "another") != first


def test_of_a_long_body_only_the_beginning_is_taken_and_it_is_not_taken_apart() -> None:
    """Twenty megabytes of an image cost everybody else a fifth of a second."""
    long = chat("x" * (3 * WHOLE_MAX_BYTES), "b")
    taken = canonical_prompt(CHAT, long, None)
    assert len(taken) < WHOLE_MAX_BYTES + 100
    assert taken == canonical_prompt(CHAT, chat("x" * (3 * WHOLE_MAX_BYTES), "b", "c"), None)
    assert taken != canonical_prompt(CHAT, long, "salt")
