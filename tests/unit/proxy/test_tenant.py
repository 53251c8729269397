"""Who sent it, and the salt that keeps tenants apart, without a socket."""

from __future__ import annotations

import pytest

from router.proxy.tenant import tenant_of


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
