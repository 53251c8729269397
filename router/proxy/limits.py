"""Every bound of the request path: unit, default, reason.

May import: the standard library, msgspec, router.policy.{overload,retry}.
"""

from __future__ import annotations

import msgspec

from router.policy.overload import WaitRules
from router.policy.retry import RetryRules


class ProxyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the proxy by the names of their flags."""

    # what clients may send
    request_max_bytes: int = 128 << 20  # long contexts and inline images reach tens of megabytes
    request_header_max_bytes: int = 65536  # one header line; JWTs and client certificates pass 8 KiB
    request_headers_max: int = 256
    request_head_limit_s: float = 30.0  # from its first byte to the end of the head (slow-loris)
    request_body_idle_limit_s: float = 60.0  # silence while a body is being sent
    client_idle_limit_s: float = 75.0  # idle keep-alive connection; above a load balancer's usual 60 s
    client_stall_limit_s: float = 300.0  # a client that does not read its reply
    connections_per_client: int = 0  # open connections from one address, 0: no limit (a load balancer is one address)
    connections_max: int = 20_000  # in all; below the usual file descriptor limits together with the pods' side
    buffered_bodies_max_bytes: int = 2 << 30  # request bodies held at one time, all together
    inflate_max_bytes: int = 64 << 20  # of a compressed body, for routing only; beyond it: by load
    multipart_search_max_bytes: int = 8 << 20  # where the `model` field of a form is looked for

    # what pods may do
    connect_limit_s: float = 3.0  # a pod in the same cluster answers a SYN in milliseconds
    first_byte_limit_s: float = 1800.0  # to the first byte of a reply's body: prefills of ten minutes must live
    idle_limit_s: float = 600.0  # silence inside a reply's body
    gone_limit_s: float = 2.0  # silence of a pod that is known to be gone: vLLM freezes its streams on SIGTERM
    reply_header_max_bytes: int = 65536  # one header line of a pod's reply
    pod_keepalive_s: float = 4.0  # vLLM's uvicorn closes idle connections after 5 s

    # waiting for room: router.waiting
    overload_prefill_s: float = 0.0  # hold requests while every worker has more prefill booked; 0: never
    overload_wait_s: float = 10.0  # longest wait, below what load balancers take for a dead connection
    overload_queue_requests: int = 1000  # that wait at one time

    # trying again
    retry_attempts: int = 4
    retry_budget_ratio: float = 0.2  # retries per request, so that a sick fleet's load is not multiplied
    retry_reserve: int = 20  # retries at hand with no traffic before them
    retry_ambiguous: bool = True

    # what we say and show
    retry_after_s: int = 1  # in our own 429 and 503: a pod comes or frees up within seconds
    decision_headers: bool = False
    allow_policy_header: bool = False
    admin_on_main: bool = False
    pod_api_key: str | None = None  # the pods' own --api-key: sent to them in place of the client's
    forward_authorization: bool | None = None  # None: only when the router itself asks for no key
    tenant_header: str | None = None  # lower case; None: tenants are not told apart
    tenant_salt: bool = False  # with tenant_header: every JSON body gets its tenant's cache_salt
    key_seed: str = ""  # makes the salts
    forward_control_routes: bool = False  # /sleep, /reset_prefix_cache, ... act on one pod: call that pod itself
    stream_comment_interval_s: float = 0.0  # `:` comments before a stream's first byte, for load balancers; 0: none

    @property
    def wait_rules(self) -> WaitRules:
        return WaitRules(
            prefill_s=self.overload_prefill_s,
            wait_s=self.overload_wait_s,
            queue_requests=self.overload_queue_requests,
            retry_after_s=self.retry_after_s,
        )

    @property
    def retry_rules(self) -> RetryRules:
        return RetryRules(attempts=self.retry_attempts, retry_ambiguous=self.retry_ambiguous)
