"""What a wrong setting is answered: which one, why, and what to do."""

import errno
import resource
import runpy
from pathlib import Path

import pytest

from router.app import proxy_limits
from router.cli import main
from router.fleet.build import build_fleet, fleet_specs
from router.process import cannot_listen, raise_descriptor_limit
from router.settings import IndexSettings, ServeSettings, SettingsError, pairs, read, unread

POD = ["http://10.0.0.1:8000"]


def test_a_settings_file_that_is_not_there_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be read .*nope\.yaml"):
        read(ServeSettings, {"config": str(tmp_path / "nope.yaml")})


def test_a_settings_file_is_read_and_a_misspelt_name_in_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text("port: 8085\npod:\n  - http://10.0.0.1:8000\n")
    settings = read(ServeSettings, {"config": str(file)})
    assert (settings.port, settings.pod) == (8085, POD)
    file.write_text("polic: random\n")
    with pytest.raises(SettingsError, match="polic in the settings file is no setting"):
        read(ServeSettings, {"config": str(file)})


@pytest.mark.parametrize("text", ["port: [", "just words"])
def test_a_settings_file_that_is_no_settings_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match="cannot be read as YAML"):
        read(ServeSettings, {"config": str(file)})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "--pods", "http://x"], "unknown argument --pods; did you mean --pod?"),
        (["serve", "--tokeniser=tiny=x"], "unknown argument --tokeniser; did you mean --tokenizer?"),
        (["index", "--port", "1"], "unknown argument --port"),
        (["serve", "--redis-url", "127.0.0.1:6379"], "): must begin with redis://"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_right_one(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["redis://:s3/cret@h:1", "redis://:s3#cret@h", "redis://u:6379?s3cret@h", "s3cret@h:6379"]
)
def test_a_secret_that_cannot_be_used_is_not_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--redis-url", url]) == 2
    told = capsys.readouterr().err
    assert "--redis-url" in told
    assert "s3" not in told


def test_a_secret_made_from_a_file_ends_with_a_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "POD_API_KEY": "k\n",
        "REDIS_URL": " redis://h\r\n",
        "KEY_SEED": "s\n",
        "API_KEY": "a\n",
    }.items():
        monkeypatch.setenv(f"WARMROUTE_{name}", value)
    settings = read(ServeSettings, {})
    assert (settings.pod_api_key, settings.redis_url, settings.key_seed) == ("k", "redis://h", "s")
    assert settings.api_key == ["a"]
    for bad in ("two\nlines", "schl\u00fcssel", " "):
        with pytest.raises(SettingsError, match="one line"):
            read(ServeSettings, {"pod_api_key": bad})


def test_kubernetes_own_variables_for_a_service_called_warmroute_are_no_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"PORT": "tcp://10.0.0.1:80", "SERVICE_PORT": "80", "PORT_80_TCP_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(f"WARMROUTE_{name}", value)
    assert read(ServeSettings, {}).port == 8080
    assert read(ServeSettings, {"port": "81"}).port == 81


@pytest.mark.parametrize("given", [[""], ["k", ""], [" "]])
def test_an_empty_key_does_not_open_the_door_to_everybody(
    given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"WARMROUTE_API_KEY.*is empty; give the key, or leave"):
        read(ServeSettings, {"api_key": given})
    file = tmp_path / "warmroute.yaml"
    file.write_text(f"api_key: {given}\n")
    with pytest.raises(SettingsError, match="is empty; give the key"):
        read(ServeSettings, {"config": str(file)})
    for empty in ("", "\n"):
        monkeypatch.setenv("WARMROUTE_API_KEY", empty)
        with pytest.raises(SettingsError, match="is empty; give the key"):
            read(ServeSettings, {})
        assert read(ServeSettings, {"api_key": ["k"]}).api_key == ["k"]


def test_what_is_given_and_has_no_effect_is_told() -> None:
    typed = {"WARMROUTE_POLCY": "x", "WARMROUTE_CHECK": "1", "warmroute_port": "1", "PATH": "/bin"}
    typed |= {"WARMROUTE_SERVICE_HOST": "10.0.0.1", "WARMROUTE_VALKEY_PORT": "tcp://10.0.0.2:6379"}
    typed |= {"WARMROUTE_PORT_80_TCP_PROTO": "tcp", "WARMROUTE_SERVICE_PORT_HTTP": "80"}
    assert unread(ServeSettings(), typed) == [
        "WARMROUTE_POLCY in the environment is no setting and is not read; did you mean WARMROUTE_POLICY?"
    ]
    alone = {"overload_wait_s": "5", "exchange_ms": "50"}
    assert unread(read(ServeSettings, alone), {}) == [
        "--overload-wait-s is not read without --overload-prefill-s",
        "--exchange-ms is not read without --redis-url",
    ]
    both = {**alone, "overload_prefill_s": "2", "redis_url": "redis://h"}
    assert unread(read(ServeSettings, both), {}) == []
    assert unread(read(ServeSettings, {"exchange_ms": "0"}), {}) == []


def test_descriptors_are_had_as_many_as_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_h66_times_that_do_not_fit_each_other_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    build_fleet(read(ServeSettings, {}))
    assert not caplog.records
    build_fleet(read(ServeSettings, {"scrape_interval_s": "15"}))
    assert "--scrape-stale-after-s 10 is below" in caplog.text


def test_no_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (ServeSettings(selector="app=vllm"), "--selector needs --discovery kubernetes"),
        (ServeSettings(pods_file=Path("pods"), pod=POD), "--pods-file needs --discovery file"),
        (IndexSettings(discovery="kubernetes", selector="app=vllm", pod=POD), "--pod and --discovery kubernetes"),
    ],
)
def test_settings_that_would_not_be_read_are_refused(settings: ServeSettings | IndexSettings, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        fleet_specs(settings)


def test_a_router_without_any_pod_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert fleet_specs(ServeSettings()) == []
    assert "give --pod SPEC" in caplog.text


def test_a_pair_without_its_value_is_told_its_form() -> None:
    with pytest.raises(SettingsError, match="--tokenizer 'tiny' must be MODEL=PATH_OR_ID"):
        pairs(["tiny"], "--tokenizer")


def test_a_port_that_cannot_be_had_names_a_flag_that_exists() -> None:
    taken = OSError(errno.EADDRINUSE, "address already in use")
    for what, flag in (("client", "--port"), ("admin", "--admin-port")):
        assert f"choose another {flag}" in str(cannot_listen(what, "127.0.0.1", 1, taken))
        assert flag[2:].replace("-", "_") in ServeSettings.model_fields
    strange = OSError(errno.EADDRNOTAVAIL, "cannot assign requested address")
    assert "is --host one of this machine's?" in str(cannot_listen("client", "10.9.9.9", 1, strange))


@pytest.mark.parametrize(
    ("module", "argv", "command"),
    [
        ("router", ["--help"], "serve"),
        ("router", ["serve", "--help"], "serve"),
        ("router", ["index", "--help"], "index"),
        ("indexer", ["--help"], "index"),
        ("indexer", ["index", "--help"], "index"),
    ],
)
def test_python_m_takes_a_command_or_leaves_it_out(
    module: str, argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [module, *argv])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: warmroute {command} ")


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ({"tenant_salt": True, "key_seed": "s"}, "needs --tenant-header NAME"),
        ({"tenant_salt": True, "tenant_header": "x-tenant"}, "needs --key-seed SECRET"),
        ({"tenant_header": "two words"}, "must be the name of a header"),
    ],
)
def test_tenants_that_could_not_be_kept_apart_are_refused_at_the_start(flags: dict, cure: str) -> None:
    with pytest.raises(SettingsError, match=cure):
        proxy_limits(read(ServeSettings, flags))
    kept = proxy_limits(read(ServeSettings, {"tenant_salt": True, "tenant_header": "X-Tenant", "key_seed": "s"}))
    assert (kept.tenant_header, kept.key_seed) == ("x-tenant", "s")
