"""GETs to the Kubernetes API: credentials that never grow old, pages of a list, lines of a watch.

`kubernetes.aio` reads the credentials and signs the requests; its typed calls are not used, because they hide the
time limits. May import: the standard library, aiohttp, kubernetes (imported on first use), msgspec,
router.fleet.k8s_objects.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from router.fleet.k8s_objects import Page, Status

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_LIMIT_S = 3.0
IDLE_LIMIT_S = 10.0  # between two reads of a list; a watch may be silent for its whole life
LIST_LIMIT_S = 30.0
PAGE_ITEMS = 250


class ApiError(Exception):
    """The API server answered with something else than 200, or said ERROR inside a watch. The text is safe to log."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}".strip()[:300])
        self.status = status


class CredentialsError(Exception):
    """No usable way into a cluster; the text says what was looked for and what to do."""


class Credentials:
    """`KUBECONFIG` if set, else the pod's service account, else ~/.kube/config; read anew at each `load`."""

    def __init__(self, environ: Mapping[str, str] = os.environ, service_account: Path = SERVICE_ACCOUNT) -> None:
        self._environ, self._account = environ, service_account

    async def load(self) -> tuple[Any, str]:
        """A fresh kubernetes.aio Configuration and the namespace that goes with it. Raises CredentialsError."""
        from kubernetes.aio.client import Configuration  # 60 MB: only for those who discover with it

        config = type.__call__(Configuration)
        config.retries = None  # the reflector alone decides when to try again
        kubeconfig = self._environ.get("KUBECONFIG")
        home = Path(self._environ.get("HOME", "/")) / ".kube" / "config"
        try:
            if kubeconfig:
                namespace = await self._from_kubeconfig(kubeconfig, config)
            elif self._environ.get("KUBERNETES_SERVICE_HOST"):
                namespace = self._from_service_account(config)
            elif home.is_file():
                namespace = await self._from_kubeconfig(str(home), config)
            else:
                raise CredentialsError(
                    "no way into a cluster: KUBECONFIG is not set, this is not a pod "
                    "(KUBERNETES_SERVICE_HOST is not set), and there is no ~/.kube/config"
                )
        except CredentialsError:
            raise
        except Exception as exc:  # KeyError, TypeError, YAML errors, its own: whose texts may quote a token
            where = kubeconfig or (str(self._account) if self._environ.get("KUBERNETES_SERVICE_HOST") else str(home))
            raise CredentialsError(
                f"the Kubernetes credentials in {where} cannot be read ({type(exc).__name__})"
            ) from exc
        if token := config.api_key.get("BearerToken"):
            config.api_key["BearerToken"] = token.strip()  # a token file often ends with a newline
        return config, namespace

    async def _from_kubeconfig(self, path: str, config: Any) -> str:
        from kubernetes.aio.config.kube_config import load_kube_config

        if not any(os.path.isfile(os.path.expanduser(part)) for part in path.split(os.pathsep)):  # noqa: ASYNC240
            raise CredentialsError(f"KUBECONFIG names {path}, and there is no such file")
        loader = await load_kube_config(config_file=path, client_configuration=config, persist_config=False)
        return loader.current_context["context"].get("namespace") or "default"

    def _from_service_account(self, config: Any) -> str:
        from kubernetes.aio.config.incluster_config import InClusterConfigLoader

        InClusterConfigLoader(
            token_filename=str(self._account / "token"),
            cert_filename=str(self._account / "ca.crt"),
            try_refresh_token=False,  # `load` is called before every list
            environ=self._environ,
        ).load_and_set(config)
        namespace = self._account / "namespace"
        return namespace.read_text().strip() if namespace.is_file() else "default"


class KubeApi:
    """One session to the API server. Not shared between reflectors, so that each may close its own."""

    def __init__(self, credentials: Credentials, namespace: str | None) -> None:
        self._credentials, self._wanted_namespace = credentials, namespace
        self._client: Any = None
        self._made_of: tuple[object, ...] = ()
        self.namespace = namespace or "default"

    async def refresh(self) -> None:
        """Reads the credentials again; keeps the session if only the token is another. Raises CredentialsError."""
        from kubernetes.aio.client import ApiClient

        async with asyncio.timeout(LIST_LIMIT_S):  # a kubeconfig may run a program to get a token
            config, namespace = await self._credentials.load()
        self.namespace = self._wanted_namespace or namespace
        made_of = _identity(config)
        if self._client is not None and made_of == self._made_of:
            self._client.configuration.api_key = config.api_key
            return
        await self.close()
        self._client, self._made_of = ApiClient(config), made_of

    async def close(self) -> None:
        """Closes the session, if there is one."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def get(self, path: str) -> bytes:
        """The body of one object. Raises ApiError, aiohttp.ClientError, TimeoutError."""
        async with await self._open(path, (), LIST_LIMIT_S, IDLE_LIMIT_S) as response:
            return await response.read()

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[Page, None]:
        """All pages of a list, as of now: no resourceVersion, so never a stale answer. Raises as `get` does."""
        more: str | None = ""
        while more is not None:
            params = [*query.items(), ("limit", str(PAGE_ITEMS)), *([("continue", more)] if more else [])]
            async with await self._open(path, params, LIST_LIMIT_S, IDLE_LIMIT_S) as response:
                page = msgspec.json.decode(await response.read(), type=Page)
            yield page
            more = page.metadata.continue_ or None

    async def watch(
        self, path: str, query: Mapping[str, str], version: str | int | None, *, life_s: int, limit_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Lines of a watch from `version` on; the server ends it after `life_s`, we after `limit_s` in any case.

        Raises as `get` does; TimeoutError when the server has not ended it in time, so was perhaps gone for long.
        """
        params = [*query.items(), ("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(life_s))]
        if version:
            params.append(("resourceVersion", str(version)))
        async with await self._open(path, params, limit_s, None) as response:
            async for line in response.content:
                if line.strip():
                    yield line

    async def _open(
        self, path: str, params: Sequence[tuple[str, str]], limit_s: float, idle_limit_s: float | None
    ) -> aiohttp.ClientResponse:
        if self._client is None:
            await self.refresh()
        request = await self._client.param_serialize(
            "GET",
            path,
            query_params=list(params),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        limits = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_LIMIT_S, sock_read=idle_limit_s)
        reply = await self._client.call_api(*request, _request_timeout=limits)
        response: aiohttp.ClientResponse = reply.response
        if response.status != 200:
            async with response:
                raise ApiError(response.status, _message(await response.content.read(4096)))
        return response


def _identity(config: Any) -> tuple[object, ...]:
    """What a session is made of, besides the token; a rotated certificate shows by its content."""
    files = (config.ssl_ca_cert, config.cert_file, config.key_file)
    contents = tuple(Path(name).read_bytes() if name and Path(name).is_file() else name for name in files)
    return (config.host, config.verify_ssl, config.tls_server_name, config.proxy, *contents)


def _message(body: bytes) -> str:
    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError:
        return "(no Kubernetes Status in the reply: is this the API server?)"
    return status.message or status.reason or ""
