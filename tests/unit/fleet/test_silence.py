"""When a serving pod that does not answer is taken out, as a specification."""

import pytest

from router.fleet.silence import may_stay

HEARD, SILENT = 0.5, 9.0


@pytest.mark.parametrize(
    ("slow_probes", "silent_s", "others_silent_s", "stays"),
    [
        pytest.param(1, HEARD, [HEARD], True, id="late with /health, but it answers metrics or requests"),
        pytest.param(2, HEARD, [HEARD], True, id="twice late"),
        pytest.param(3, HEARD, [HEARD], False, id="three times late is too often"),
        pytest.param(1, SILENT, [HEARD], False, id="silent while the other one answers"),
        pytest.param(1, SILENT, [HEARD, HEARD, SILENT], False, id="silent while most answer"),
        pytest.param(1, SILENT, [HEARD, SILENT], True, id="half are silent: the network, or we ourselves were held up"),
        pytest.param(1, SILENT, [SILENT] * 7, True, id="all are silent"),
        pytest.param(3, SILENT, [SILENT] * 7, False, id="all are silent for long"),
        pytest.param(1, SILENT, [], True, id="the only one: late is better than nobody"),
        pytest.param(1, float("inf"), [HEARD], False, id="never heard of"),
    ],
)
def test_who_may_stay(slow_probes: int, silent_s: float, others_silent_s: list[float], stays: bool) -> None:
    assert may_stay(slow_probes=slow_probes, silent_s=silent_s, others_silent_s=others_silent_s) is stays
