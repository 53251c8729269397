"""Settings that say what the pods were started with."""

from pathlib import Path

import pytest

from router.app import token_options
from router.settings import ServeSettings, SettingsError, read


def settings(**flags: object) -> ServeSettings:
    return read(ServeSettings, {"pod": ["http://127.0.0.1:1"], **flags})


def test_nothing_given_is_vllms_own_default() -> None:
    (common,) = token_options(settings()).values()
    assert (common.chat_template, common.content_format, common.trust_request_template) == (None, "auto", False)


def test_templates_and_variables_by_model(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    options = token_options(
        settings(
            chat_template=[f"a={tmp_path / 't.jinja'}"],
            chat_template_kwargs=['a={"enable_thinking": false}', '*={"x": 1}'],
            chat_template_content_format="openai",
        )
    )
    assert options["a"].chat_template == "{{ messages }}"
    assert options["a"].default_template_kwargs == {"enable_thinking": False}
    assert options["a"].content_format == options["*"].content_format == "openai"
    assert options["*"].default_template_kwargs == {"x": 1}


@pytest.mark.parametrize(
    "flags",
    [{"chat_template": ["a=/no/such/file"]}, {"chat_template_kwargs": ["a=[1]"]}, {"chat_template_kwargs": ["a={"]}],
)
def test_what_cannot_be_used_is_refused_with_its_flag(flags: dict[str, list[str]]) -> None:
    with pytest.raises(SettingsError, match="--chat-template"):
        token_options(settings(**flags))
