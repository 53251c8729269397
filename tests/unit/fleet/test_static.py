"""SPEC = URL[,events=...][,replay=...][,ranks=N][,model=NAME]."""

import pytest

from router.fleet.static import normalise_url, parse_spec, parse_specs


def test_all_parts() -> None:
    spec = parse_spec("http://H:8000/,events=tcp://[::1]:5557,replay=tcp://h:5558,ranks=4,model=org/m")
    assert (spec.url, spec.events, spec.replay, spec.ranks, spec.model) == (
        "http://h:8000",
        "tcp://[::1]:5557",
        "tcp://h:5558",
        4,
        "org/m",
    )


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://Host", "http://host:80"),
        ("https://host/", "https://host:443"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://h:1/base/", "http://h:1/base"),
    ],
)
def test_two_spellings_of_a_pod_are_one(url: str, normal: str) -> None:
    assert normalise_url(url) == normal


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("h:8000", "http://"),
        ("http://", "host"),
        ("http://h:99999", "cannot be read"),
        ("http://u:p@h:1", "credentials"),
        ("http://h:1/v1/", "leave /v1 out"),
        ("http://h:1,event=tcp://h:2", "not understood"),
        ("http://h:1,events=tcp://*:2", "belongs"),
        ("http://h:1,events=h:2", "cannot be connected"),
        ("http://h:1,events=tcp://h", "cannot be connected"),
        ("http://h:1,ranks=0", "ranks"),
        ("http://h:1,ranks=x", "ranks"),
        ("http://h:1,model=a,model=b", "once"),
    ],
)
def test_bad_specs_are_refused_with_the_cure(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as refused:
        parse_spec(text)
    assert word in str(refused.value)


def test_no_pod_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_specs(["http://h:1", "http://H:1/"])
