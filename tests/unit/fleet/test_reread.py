"""Looking again: shared by who asks, limited in rate and in time."""

import asyncio

from router.fleet.reread import Reread


class Looks:
    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.go = asyncio.Event()

    async def look(self) -> None:
        self.begun += 1
        try:
            await self.go.wait()
        finally:
            self.ended += 1


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def asking(reread: Reread, number: int) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.create_task(reread.now()) for _ in range(number)]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_who_asks_at_once_shares_one_look_and_a_moment_later_there_is_none() -> None:
    looks, clock = Looks(), Clock()
    reread = Reread(looks.look, interval_s=1.0, limit_s=30.0, clock=clock)
    tasks = await asking(reread, 50)
    assert looks.begun == 1
    tasks[0].cancel()  # a client that leaves takes nothing from the others
    looks.go.set()
    assert await asyncio.gather(*tasks[1:]) == [True] * 49
    clock.now_s += 0.9
    assert await reread.now() is False
    clock.now_s += 0.2
    assert await reread.now() is True
    assert looks.begun == 2


async def test_a_look_that_hangs_ends_at_its_limit_and_with_its_owner() -> None:
    looks = Looks()
    assert await Reread(looks.look, interval_s=1.0, limit_s=0.0).now() is True
    assert looks.ended == 1
    reread = Reread(looks.look, interval_s=1.0, limit_s=30.0)
    await asking(reread, 1)
    await reread.close()
    assert looks.ended == 2
