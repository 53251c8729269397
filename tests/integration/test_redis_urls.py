"""What an operator gets told of a Redis that cannot be used, and what is asked of every connection to one."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.core.types import Add, BlockKey, IndexUnavailable, WorkerAddress, WorkerId
from router.index.link import Link
from router.index.redis import RedisIndexReader, RedisIndexWriter
from router.ops import Metrics
from router.settings import SettingsError
from tests.fakes.proxy_world import eventually
from tests.fakes.redis_servers import Server, running

KEYS = [BlockKey(b"12345678")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("valkey", tmp_path_factory.mktemp("valkey")) as it:
        it.command("ACL", "SETUSER", "reader", "on", ">s3cret", "~*", "&*", "+@all", "-hgetall")
        it.command("ACL", "SETUSER", "writer", "on", ">s3c/r#t", "~*", "&*", "+@all")
        yield it


@pytest.mark.parametrize(
    ("login", "says"),
    [("reader:wrong@", "invalid username-password pair"), ("reader:s3cret@", "NoPermissionError: .*hgetall")],
)
async def test_what_redis_says_is_shown_and_no_password(server: Server, login: str, says: str) -> None:
    reader = RedisIndexReader(server.url.replace("//", f"//{login}"), seed="s", metrics=Metrics(), deadline_s=2.0)
    with pytest.raises(IndexUnavailable, match=says):
        await reader._refresh(2.0)
    await reader.start()
    try:
        shown = str(reader.status()["last_error"])
        assert "s3cret" not in shown
    finally:
        await reader.close()


async def test_a_channel_that_may_not_be_heard_is_shown(server: Server) -> None:
    """What a new user of Redis 7 has: no channel at all. Lookups work; removals are heard of later."""
    server.command("ACL", "SETUSER", "deaf", "on", ">p", "~*", "resetchannels", "+@all")
    reader = RedisIndexReader(server.url.replace("//", "//deaf:p@"), seed="s", metrics=Metrics(), deadline_s=2.0)
    await reader.start()
    try:
        await eventually(lambda: reader.status()["last_error"])
        assert "channel" in reader.status()["last_error"]
        assert await reader.holders(KEYS) == {}
    finally:
        await reader.close()


async def test_percent_encoded_passwords_and_options_of_the_url(server: Server) -> None:
    """What the client relies on cannot be switched by the URL."""
    link = Link(
        server.url.replace("//", "//writer:s3c%2Fr%23t@") + "?protocol=3&decode_responses=true", max_connections=1
    )
    try:
        assert await link.call(("HSET", "h", "f", "v"), ("HGETALL", "h"), deadline_s=5.0) == [1, [b"f", b"v"]]
    finally:
        await link.close()


async def test_a_host_that_died_is_noticed_by_those_who_only_listen(server: Server) -> None:
    link = Link(server.url, max_connections=1)
    try:
        conn = await link.connection()
        sock = conn._writer.get_extra_info("socket")  # type: ignore[attr-defined]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 15
        await link.drop(conn)
    finally:
        await link.close()


async def test_an_acl_that_allows_no_name_is_no_reason_not_to_work(server: Server) -> None:
    server.command(
        "ACL", "SETUSER", "few", "on", ">p", "~*", "&*", "+@read", "+@write", "+@scripting", "+@pubsub", "+time"
    )
    writer = RedisIndexWriter(server.url.replace("//", "//few:p@"), seed="s")
    worker = WorkerId(WorkerAddress("http://a"), "life")
    try:
        await writer.register(worker)
        await writer.apply(worker, [Add(tuple(KEYS))])
        await writer.maintain()
    finally:
        await writer.close()


@pytest.mark.parametrize("url", ["redis://h?nonsense=1", "redis://h?max_connections=x", "rediss://h?ssl_cert_reqs=x"])
def test_an_option_that_is_none_is_refused_with_the_cure(url: str) -> None:
    with pytest.raises(SettingsError, match="percent-encoded"):
        Link(url, max_connections=1)


def test_a_unix_socket_takes_no_keepalive(tmp_path: Path) -> None:
    Link(f"unix://{tmp_path}/redis.sock?db=1", max_connections=1)
