"""/debug/prefixes on the admin port."""

from typing import Any

import aiohttp
from aiohttp import web

from router.admin import AdminPages, build_admin_app
from router.door import Lifecycle
from router.ops import Metrics


class NoFleet:
    def status(self) -> list[dict[str, Any]]:
        return []

    def pods(self) -> Any:
        return ()


async def ask(pages: AdminPages, method: str) -> tuple[int, Any]:
    runner = web.AppRunner(build_admin_app(pages))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/debug/prefixes"
        async with aiohttp.ClientSession() as http, http.request(method, url) as reply:
            return reply.status, await reply.json()
    finally:
        await runner.cleanup()


async def test_the_page_says_what_it_is_given() -> None:
    pages = AdminPages(metrics=Metrics(), fleet=NoFleet(), lifecycle=Lifecycle(), prefixes=lambda: {"top": [1]})
    assert await ask(pages, "GET") == (200, {"top": [1]})
    assert (await ask(pages, "POST"))[0] == 405


async def test_an_indexer_names_the_pages_that_it_has() -> None:
    pages = AdminPages(metrics=Metrics(), fleet=NoFleet(), lifecycle=Lifecycle())
    status, told = await ask(pages, "GET")
    assert (status, told["error"]["message"]) == (
        404,
        "No such page; there are /health, /ready, /metrics, /debug/pods.",
    )
