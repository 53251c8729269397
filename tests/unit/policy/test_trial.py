"""What --control and --shadow may be, and what is said to the rest."""

import pytest

from router.policy.baselines import POLICIES
from router.policy.trial import Control, another_policy, parse_control


@pytest.mark.parametrize(
    ("text", "control"),
    [
        ("random:2%", Control("random", 0.02)),
        (" round-robin:0.5% ", Control("round-robin", 0.005)),
        ("random:50%", Control("random", 0.5)),
    ],
)
def test_a_control_group(text: str, control: Control) -> None:
    assert parse_control(text, policy="prefix", known=POLICIES) == control


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        pytest.param("random", "must be POLICY:SHARE%, such as random:2%", id="no share"),
        pytest.param("random:2", "must be POLICY:SHARE%, such as random:2%", id="two of what?"),
        pytest.param("random:0.02", "must be POLICY:SHARE%, such as random:2%", id="a ratio"),
        pytest.param("2%:random", "must be POLICY:SHARE%, such as random:2%", id="turned round"),
        pytest.param("random:-2%", "must be POLICY:SHARE%, such as random:2%", id="less than nothing"),
        pytest.param("random:1e1%", "must be POLICY:SHARE%, such as random:2%", id="exponent"),
        pytest.param("random:0%", "the share must be above 0%", id="nothing"),
        pytest.param("random:98%", "let random be the --policy and prefix the control", id="most"),
        pytest.param("rondom:2%", "is no policy; there are cache-aware, consistent-hash", id="unknown"),
        pytest.param("prefix:2%", "is the --policy itself", id="the same"),
    ],
)
def test_a_control_group_that_cannot_be_says_what_to_write(text: str, cure: str) -> None:
    with pytest.raises(ValueError, match=r"^--control '") as refused:
        parse_control(text, policy="prefix", known=POLICIES)
    assert cure in str(refused.value)


def test_a_shadow_is_another_policy() -> None:
    assert another_policy("prefix", flag="--shadow", policy="random", known=POLICIES) == "prefix"
    with pytest.raises(ValueError, match="--shadow 'random' is the --policy itself"):
        another_policy("random", flag="--shadow", policy="random", known=POLICIES)
