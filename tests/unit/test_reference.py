"""The reference pages say what the code says; every bound of the proxy is a setting."""

import importlib.util
import re
from pathlib import Path

import pytest

from router.policy.baselines import POLICIES
from router.proxy.limits import ProxyLimits
from router.settings import ServeSettings

DOCS = Path(__file__).parents[2] / "docs"
_spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


@pytest.mark.parametrize("page", sorted(generate.PAGES))
def test_a_reference_page_is_current(page: str) -> None:
    assert (DOCS / page).read_text() == generate.PAGES[page](), "run `make docs`"


def test_every_bound_of_the_proxy_is_a_setting_with_the_same_default() -> None:
    settings = ServeSettings(_env_prefix="NOBODY_SETS_THIS_")
    limits = ProxyLimits()
    wrong = [
        name
        for name in ProxyLimits.__struct_fields__
        if not hasattr(settings, name) or getattr(settings, name) != getattr(limits, name)
    ]
    assert wrong == []


def test_every_policy_and_every_reason_is_explained() -> None:
    page = (DOCS / "policies.md").read_text()
    assert [name for name in POLICIES if f"`{name}`" not in page] == []
    source = "".join((DOCS.parent / "router" / "policy" / f).read_text() for f in ("pick.py", "baselines.py"))
    reasons = set(re.findall(r'(?:reason = |rng, |_chosen\(.*, )"([a-z_]+)"', source))
    assert reasons >= {"prefix", "placement", "load", "random", "hash"}
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in page] == []
