"""From samples to figures, and what a report says of a run that should not be believed."""

import csv
import io
import statistics
from random import Random
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from loadtest import report_html, report_text
from loadtest.report import doubts, figures, summaries, tpot_s
from loadtest.samples import ArmRun, Gaps, PodCounters, Run, Sample, StageOutcome, percentile


def sample(**changes: object) -> Sample:
    plain = Sample(
        at_s=0.0,
        late_s=0.001,
        ttft_s=0.2,
        e2e_s=1.2,
        prompt_tokens=100,
        output_tokens=11,
        cached_tokens=64,
        events=11,
        reads=11,
        failure=None,
        pod="http://a",
        matched_tokens=64,
        group="g",
    )
    return msgspec.structs.replace(plain, **changes)


def stage(samples: list[Sample], **changes: object) -> StageOutcome:
    plain = StageOutcome("10/s", 10.0, 10.0, True, wall_s=12.0, planned_requests=len(samples), samples=samples)
    return msgspec.structs.replace(plain, **changes)


def run_of(*arms: tuple[str, list[StageOutcome]], **changes: object) -> Run:
    plain = Run(
        name="test",
        workload="about <it>",
        seed=1,
        started_unix_s=0.0,
        command="warmroute loadtest compare",
        machine="x",
        target="http://router",
        model="m",
        client_processes=1,
        exact_lengths=True,
        emulated=None,
        slo_ttft_s=0.5,
        slo_tpot_s=0.15,
        late_limit_s=0.05,
        runs=[ArmRun(arm, 0, stages, True) for arm, stages in arms],
    )
    return msgspec.structs.replace(plain, **changes)


def of(*stages: StageOutcome):
    return figures(stages, slo_ttft_s=0.5, slo_tpot_s=0.15)


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 100, 997])
def test_percentiles_are_the_nearest_rank_of_the_standard_definition(count: int) -> None:
    rng = Random(count)
    values = [rng.random() for _ in range(count)]
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        least = min(v for v in values if sum(w <= v for w in values) >= share * count)
        assert percentile(values, share) == least
    assert percentile([], 0.5) is None


def test_gaps_keep_percentiles_within_two_percent() -> None:
    rng = Random(4)
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    one, other = Gaps(), Gaps()
    for n, v in enumerate(values):
        (one if n % 2 else other).add(v)
    one.merge(other)
    assert one.count == 5000
    for share in (0.5, 0.9, 0.99):
        assert one.percentile_s(share) == pytest.approx(percentile(values, share), rel=0.021)
        assert Gaps.scaled(one, 0.25).percentile_s(share) == pytest.approx(percentile(values, share) / 4, rel=0.03)
    assert Gaps().percentile_s(0.5) is None


def test_a_stage_is_counted_by_the_definitions() -> None:
    good = [sample(), sample(ttft_s=0.4, e2e_s=0.4, output_tokens=1, cached_tokens=0, pod="http://b")]
    slow = sample(ttft_s=0.9, pod="http://b", matched_tokens=32)
    lost = sample(ttft_s=None, failure="http_503", pod=None, prompt_tokens=None, cached_tokens=None)
    f = of(stage([*good, slow, lost]))
    assert (f.requests, f.failed, f.failures) == (4, 1, {"http_503": 1})
    assert f.failures_by_pod == {"": {"http_503": 1}}
    assert f.completed_per_s == 3 / 12
    assert f.sent_per_s == 4 / 10
    assert f.output_tok_per_s == pytest.approx((11 + 1 + 11) / 12)
    assert f.goodput_per_s == 2 / 12, "the slow one is late, the lost one is no answer"
    assert f.ttft_p50 == 0.4
    assert f.ttft_mean == pytest.approx(statistics.fmean([0.2, 0.4, 0.9]))
    assert f.hit_share_usage == pytest.approx(128 / 300)
    assert f.predicted_equal == pytest.approx(1 / 3)
    assert f.requests_by_pod == {"http://a": 1, "http://b": 2}
    assert f.imbalance == pytest.approx(2 / 1.5)


def test_the_token_after_the_first_sets_tpot() -> None:
    assert tpot_s(sample(ttft_s=0.2, e2e_s=1.2, output_tokens=11)) == pytest.approx(0.1)
    assert tpot_s(sample(output_tokens=1)) is None
    assert tpot_s(sample(ttft_s=None)) is None


def test_the_pods_own_counters_make_their_hit_share_and_balance() -> None:
    pods = {
        "http://a": PodCounters(1000, 900, 1000, 50, 0, 7),
        "http://b": PodCounters(1000, 100, 1000, 50, 0, 3),
    }
    f = of(stage([sample(pod=None)], pods=pods))
    assert f.hit_share_pods == 0.5
    assert f.requests_by_pod == {"http://a": 7, "http://b": 3}


def test_a_pod_that_got_nothing_in_one_arm_shows_as_idle_there() -> None:
    both, one = [sample(), sample(pod="http://b")], [sample(), sample()]
    run = run_of(("random", [stage(both)]), ("prefix", [stage(one)]), ("other", [stage([sample(pod="http://c")])]))
    random, prefix, other = (s.pooled for s in summaries(run))
    assert random.requests_by_pod == {"http://a": 1, "http://b": 1}
    assert (prefix.requests_by_pod, prefix.imbalance) == ({"http://a": 2, "http://b": 0}, 2.0)
    assert other.requests_by_pod == {"http://c": 1}, "of a fleet of its own"


def test_the_table_names_the_model() -> None:
    console = Console(record=True, file=io.StringIO(), width=150)
    console.print(report_text.render(run_of(("a", [stage([sample()])]))))
    assert "; model m;" in console.export_text()


def test_aggregates_are_the_published_ones() -> None:
    """Mean of the stages' tok/s unweighted; mean of the stages' p90 weighted by requests."""
    fast = stage([sample(ttft_s=0.1)] * 10, name="3/s")
    slow = stage([sample(ttft_s=1.0)] * 30, name="60/s", wall_s=33.0)
    warm = stage([sample(ttft_s=9.0)] * 5, name="warm-up", measured=False)
    (arm,) = summaries(run_of(("random", [warm, fast, slow])))
    assert [n for n, _ in arm.by_stage] == ["3/s", "60/s"]
    assert arm.stage_mean_tok_per_s == pytest.approx((110 / 12 + 330 / 33) / 2)
    assert arm.weighted_ttft_p90 == pytest.approx((10 * 0.1 + 30 * 1.0) / 40)
    assert arm.pooled.requests == 40


@pytest.mark.parametrize(
    ("samples", "invalid", "said"),
    [
        pytest.param([sample()] * 50, False, None, id="nothing wrong"),
        pytest.param([sample(late_s=0.3)] * 50, True, "client was the limit", id="a client that cannot keep up"),
        pytest.param([sample(failure="http_500", ttft_s=None)] * 5, True, "every request failed", id="all failed"),
        pytest.param(
            [sample()] * 19 + [sample(failure="cut")], False, "1 of 20 requests failed (cut 1)", id="5 % failed"
        ),
        pytest.param(
            [sample(reads=1, ttft_s=1.19, events=40)] * 50, False, "came all at once", id="a proxy that buffers it all"
        ),
        pytest.param([sample(reads=4, events=40)] * 50, False, "in clumps", id="a proxy that buffers blocks"),
        pytest.param([], True, "no request was measured", id="nothing sent"),
    ],
)
def test_what_a_reader_must_know_is_said(samples: list[Sample], invalid: bool, said: str | None) -> None:
    run = run_of(("prefix", [stage(samples)]))
    why, know = doubts(run)
    assert bool(why) == invalid
    text = " ".join(why + know)
    assert said in text if said else not text
    page = report_html.render(run)
    assert ("This run is not valid" in page) == invalid
    assert (said or "Definitions") in page


ARMS = ("random", "round-robin", "least-loaded", "prefix")


@pytest.mark.parametrize("arms", [1, 4])
@pytest.mark.parametrize("stages", [1, 16])
@pytest.mark.parametrize("state", ["good", "failing", "empty"])
def test_every_shape_of_run_gives_a_whole_page_table_and_csv(arms: int, stages: int, state: str) -> None:
    rng = Random(7)

    def samples() -> list[Sample]:
        if state == "empty":
            return []
        failure = "connect" if state == "failing" else None
        return [
            sample(at_s=n * 0.1, ttft_s=None if failure else rng.random(), failure=failure, events=0 if failure else 11)
            for n in range(20)
        ]

    run = run_of(*[(a, [stage(samples(), name=f"{n}/s") for n in range(stages)]) for a in ARMS[:arms]])
    page = report_html.render(run)
    assert "about &lt;it&gt;" in page
    svgs = [part.split("</svg>")[0] for part in page.split("<svg")[1:]]
    assert len(svgs) >= 1
    for svg in svgs:
        root = ElementTree.fromstring("<svg" + svg + "</svg>")
        assert "nan" not in svg
        for circle in root.iter("circle"):
            assert 0 <= float(circle.get("cx", "-1")) <= 640
            assert 0 <= float(circle.get("cy", "-1")) <= 300
        for rect in root.iter("rect"):
            assert float(rect.get("height", "-1")) >= 0
    rows = list(csv.reader(io.StringIO(report_text.to_csv(run))))
    assert len(rows) == 1 + arms * (stages + 1)
    assert len({len(r) for r in rows}) == 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_text.render(run))
    text = console.export_text()
    assert all(a in text for a in ARMS[:arms])


def test_a_saved_run_gives_the_same_page_again() -> None:
    run = run_of(("prefix", [stage([sample()])]))
    again = msgspec.json.decode(msgspec.json.encode(run), type=Run)
    assert report_html.render(again) == report_html.render(run)
