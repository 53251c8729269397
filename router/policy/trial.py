"""Another policy tried on live traffic: `--control` lets it serve a share, `--shadow` only asks what it would do. Pure.

May import: the standard library, msgspec, router.core, router.policy.
"""

import re
from collections.abc import Collection
from typing import Literal

import msgspec

SHARE_MAX_PERCENT = 50.0
Arm = Literal["main", "control"]  # closed: it is a metric label


class Control(msgspec.Struct, frozen=True):
    """This share of the requests, drawn one by one, goes by another policy."""

    policy: str
    share_ratio: float


def parse_control(text: str, *, policy: str, known: Collection[str]) -> Control:
    """`random:2%` -> the control group of a router whose own policy is `policy`. Raises ValueError with the cure."""
    found = re.fullmatch(r"([a-z0-9-]+):([0-9]+(?:\.[0-9]+)?)%", text.strip())
    if found is None:
        raise ValueError(f"--control {text!r} must be POLICY:SHARE%, such as random:2%")
    share_percent = float(found[2])
    if not 0 < share_percent <= SHARE_MAX_PERCENT:
        raise ValueError(
            f"--control {text!r}: the share must be above 0% and at most {SHARE_MAX_PERCENT:g}%; for more, let"
            f" {found[1]} be the --policy and {policy} the control"
        )
    return Control(another_policy(found[1], flag="--control", policy=policy, known=known), share_percent / 100)


def another_policy(name: str, *, flag: str, policy: str, known: Collection[str]) -> str:
    """`name`, if it is a policy and not the one that serves. Raises ValueError with the cure."""
    if name not in known:
        raise ValueError(f"{flag} {name!r} is no policy; there are {', '.join(sorted(known))}")
    if name == policy:
        raise ValueError(f"{flag} {name!r} is the --policy itself, so nothing would be compared; name another one")
    return name
