"""Settings: the sources that state them, which source takes precedence, and the errors for wrong settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.sources import OPTIONS
from deploy.settings import SETTINGS, downloadable, gather, model_spec, num_bytes, parse, service_links, stages_of
from server.settings import ServerSettings, SettingsError

SAMPLES = {
    "str": "127.0.0.1",
    "int": "7",
    "float": "2.5",
    "bool": "true",
    "Path": "/tmp/x",
    "tuple[str, ...]": "one-long-key, two-long-key",
    "cors_origins": "http://one, https://two",
    "mcp_servers": "docs=https://example.com/mcp, own=private+http://tools:8000/mcp",
    "keep_requests_of": "model=qwen*, key=website",
    "proxy_networks": "127.0.0.1, 10.0.0.0/8",
    "root_path": "/llm",
    "log_level": "warning",
    "log_format": "json",
    "kv_events": "tcp://*:5557",
    "kv_events_replay": "tcp://127.0.0.1:5558",
    "ingress_key": "an-ingress-key-of-tests",
    "otlp_traces_endpoint": "http://collector:4318/v1/traces",
}


def write(folder: Path, text: str) -> Path:
    file = folder / "models.yaml"
    file.write_text(text)
    return file


def test_every_setting_of_the_server_has_a_row() -> None:
    assert sorted(s.name for s in SETTINGS) == sorted(f.name for f in fields(ServerSettings))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_every_setting_can_be_given_by_the_environment(setting: Any) -> None:
    kind = next(str(f.type) for f in fields(ServerSettings) if f.name == setting.name).removesuffix(" | None")
    variable, sample = f"RELAXSERVE_{setting.name.upper()}", SAMPLES.get(setting.name, SAMPLES[kind])
    settings, _ = gather({}, {variable: sample})
    assert getattr(settings, setting.name) == parse(setting.name, sample, variable)


def test_arguments_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, "port: 1\nstrict: true\nmax_choices: 9\ndrain_s: 3")
    settings, _ = gather({"port": 3, "host": None}, {"RELAXSERVE_PORT": "2", "RELAXSERVE_MAX_CHOICES": "8"}, config=config)
    assert (settings.port, settings.max_choices, settings.strict, settings.drain_s) == (3, 8, True, 3.0)
    assert settings.host == "127.0.0.1"


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, "port: 1234")
    assert gather({}, {"RELAXSERVE_CONFIG": str(config)})[0].port == 1234


def test_models_of_the_file_have_the_fields_of_a_load(tmp_path: Path) -> None:
    entry = "{source: org/b, name: b, quantize: int8, kv_cache_bytes: 2G, aliases: [x, y]}"
    _, (plain, full) = gather({}, {}, config=write(tmp_path, f"models:\n  - org/a=first\n  - {entry}"))
    assert (plain.name, plain.source) == ("first", "org/a")
    assert (full.name, full.quantize, full.kv_cache_bytes, full.aliases) == ("b", "int8", 2 << 30, ("x", "y"))


@pytest.mark.parametrize(("given", "found"), [("50%", 0.5), ("0.25", 0.25), ("12.5 %", 0.125), ("1", 1), ("64M", 64 << 20)])
def test_a_kv_cache_is_a_number_of_bytes_or_a_share(tmp_path: Path, given: str, found: float) -> None:
    _, (spec,) = gather({}, {}, config=write(tmp_path, f"models: [{{source: org/a, kv_cache_bytes: {given}}}]"))
    assert spec.kv_cache_bytes == found and type(spec.kv_cache_bytes) is type(found)


def test_an_alias_that_is_no_name_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model 'org/a' is called 'my model' by an alias; .*; choose another alias$"):
        gather({}, {}, config=write(tmp_path, "models: [{source: org/a, name: first, aliases: [my model]}]"))
    with pytest.raises(SettingsError, match=r"model 'org/a' is called 'my model'; .*; give one as PATH_OR_ID=NAME$"):
        gather({}, {}, models=["org/a=my model"])
    with pytest.raises(SettingsError, match=r"are both called 'first'; choose another alias$"):
        gather({}, {}, config=write(tmp_path, "models: [{source: org/a, name: first}, {source: org/b, aliases: [first]}]"))
    with pytest.raises(SettingsError, match=r"are both called 'first'; give one another name, as PATH_OR_ID=NAME$"):
        gather({}, {}, models=["org/a=first", "org/b=first"])


def test_models_of_the_arguments_replace_those_of_the_file(tmp_path: Path) -> None:
    _, specs = gather({}, {}, config=write(tmp_path, "models: [org/a]"), models=["org/b=c"])
    assert [s.name for s in specs] == ["c"]


def test_a_path_becomes_absolute_and_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_spec("qwen").source == str(tmp_path / "qwen")
    assert model_spec("./qwen/=q").name == "q"
    assert model_spec("qwen/").name == "qwen"
    assert (model_spec("demo").name, model_spec("demo=d").name, model_spec("demo").source) == ("demo", "d", "demo")
    _, (named, formed) = gather({}, {}, config=write(tmp_path, "models: [demo, {source: demo, name: d}]"))
    assert model_spec("demo").embeddings and named.embeddings and formed.embeddings, "every endpoint can be tried with the demo"
    (tmp_path / "demo").mkdir()
    assert model_spec("demo").source == str(tmp_path / "demo"), "a folder of that name comes first"
    assert (model_spec("org/name").name, model_spec("org/name").source) == ("name", "org/name")


def test_a_path_in_the_home_of_the_user_is_meant_wherever_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces the tilde in `--config=~/FILE`, in a file of variables or in a unit of systemd."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "model_root: ~/models").rename(tmp_path / "config.yaml")
    for options in ({"config": Path("~/config.yaml")}, {"config": None}):
        variables = {} if options["config"] else {"RELAXSERVE_CONFIG": "~/config.yaml"}
        assert gather({"state_file": Path("~/state.json")}, {"RELAXSERVE_API_KEY_FILE": "~/keys", **variables}, **options)[0] == (
            ServerSettings(model_root=tmp_path / "models", state_file=tmp_path / "state.json", api_key_file=tmp_path / "keys")
        )


def test_the_text_to_calibrate_on_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state file keeps its path, and the next start may have another working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    models = "[{source: org/a, calibrate: texts/own.txt}, {source: org/b, calibrate: ~/own.txt}, org/c]"
    _, specs = gather({}, {}, config=write(tmp_path, f"models: {models}"))
    assert [spec.calibrate for spec in specs] == [str(tmp_path / "texts/own.txt"), str(tmp_path / "own.txt"), ""]
    assert (parser := OPTIONS["calibrate"].parser) is not None and parser("texts/own.txt") == str(tmp_path / "texts/own.txt")


def test_a_path_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    """Neither a worker nor a state file can be told of such a path."""
    folder = tmp_path / "m\udcff"
    folder.mkdir()
    with pytest.raises(SettingsError, match=r"leads to a path that is no Unicode; rename it"):
        model_spec(f"{folder}=name")
    with pytest.raises(SettingsError, match=r"--model-root is .*; expected a path"):
        gather({"model_root": folder}, {})


def test_a_path_in_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(SettingsError, match="RELAXSERVE_API_KEY_FILE is '~no-such-user/keys'; expected a path"):
        gather({}, {"RELAXSERVE_API_KEY_FILE": "~no-such-user/keys"})


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("smollm2.gguf", "smollm2"),
        ("big-00001-of-00003.gguf", "big"),
        ("big-00002-of-00003.gguf", "big"),
        ("v1.5-q4_k_m.gguf", "v1.5-q4_k_m"),
    ],
)
def test_a_gguf_file_is_called_without_its_suffix(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).touch()
    spec = model_spec(str(tmp_path / file))
    assert (spec.name, spec.aliases) == (name, (file,))
    assert model_spec(f"{tmp_path / file}=other").aliases == (), "a chosen name is the only one"
    _, (entry,) = gather({}, {}, config=write(tmp_path, f"models: [{{source: {tmp_path / file}, aliases: [x]}}]"))
    assert (entry.name, entry.aliases) == (name, ("x", file))
    _, (entry,) = gather({}, {}, config=write(tmp_path, f"models: [{{source: {tmp_path / file}, name: y}}]"))
    assert (entry.name, entry.aliases) == ("y", ())


@pytest.mark.parametrize("source", ["smollm2.gguf", "qwen", "models/smollm2.gguf", "~/nosuch", "~nosuch/m", "a/b/c", "C:\\models\\x.gguf"])
def test_what_does_not_exist_is_not_sought_on_the_hub(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"does not exist; expected a folder, a \.gguf file, a hub id"):
        model_spec(source)


@pytest.mark.parametrize("name", ["mine", "smollm2", "org/name"])
def test_a_name_before_its_path_is_refused_with_the_right_order(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"ends with a path; expected PATH_OR_ID=NAME, here '{tmp_path}={name}'"):
        model_spec(f"{name}={tmp_path}")


@pytest.mark.parametrize("source", ["org/name", "Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m", "org/name:file-Q4_K_M.gguf"])
@pytest.mark.parametrize("host", ["", "hf.co/", "huggingface.co/", "https://huggingface.co/"])
def test_a_hub_id_is_sought_on_the_hub(source: str, host: str) -> None:
    assert model_spec(host + source).source == downloadable(host + source) == source


@pytest.mark.parametrize("source", ["llama3.2", "qwen2.5:0.5b", "a/b/c", "https://example.com/org/name", "org/name.gguf"])
def test_what_cannot_be_downloaded_is_refused_before_the_hub_is_asked(source: str) -> None:
    with pytest.raises(SettingsError, match=r"cannot be downloaded; expected a hub id such as ORGANISATION/NAME, or a name that"):
        downloadable(source)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100", 100), ("64M", 64 << 20), ("1.5GiB", 3 << 29), ("2 apples", None), ("2kB", 2048), ("", None)]
    + [("9" * 400, None), ("99999999T", None), (str(1 << 63), None)]
    + [("0.5", None), ("1.5 B", None), ("1000000.0", 1000000), ("0.5K", 512), ("0.0001K", None), ("0", 0)],
    ids=lambda value: str(value)[:12],
)
def test_bytes(text: str, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ValueError):
            num_bytes(text)
    else:
        assert num_bytes(text) == expected


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RELAXSERVE_PORT": "http"}, "RELAXSERVE_PORT is 'http'; expected a whole number"),
        ({"RELAXSERVE_PORT": "70000"}, "port is 70000; expected 0 to 65535"),
        ({"RELAXSERVE_PRT": "1"}, "RELAXSERVE_PRT, which is no setting (is RELAXSERVE_PORT meant?)"),
        ({"RELAXSERVE_STRICT": "maybe"}, "expected true or false"),
        ({"RELAXSERVE_MAX_BODY_BYTES": "8 apples"}, "expected a number of bytes"),
        ({"RELAXSERVE_MODEL_ROOT": ""}, "expected a path"),
        ({"RELAXSERVE_CONFIG": "/nowhere.yaml"}, "configuration /nowhere.yaml: No such file"),
    ],
)
def test_a_wrong_variable_is_named(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        gather({}, environment)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prt: 1", "prt in"),
        ("port: [1]", "expected a single value"),
        ("cors_origins: a", "expected a list"),
        ("- port", "is a list; expected a mapping from settings to values"),
        ("port: {", "is not YAML"),
        ("models: qwen", "expected a list"),
        ("models: [7]", "model 1 in"),
        ("models: [{name: x}]", "or fields with a source"),
        ("models: [{source: o/n, quantise: int8}]", "quantise of model 1"),
        ("models: [{source: o/n, max_batch: many}]", "is 'many'; expected `int`"),
        ("models: [{source: o/n, quantize: 4.6}]", "is 4.6; expected `str`, got `float`: put it in quotes"),
        ("models: [{source: o/n, name: 7}]", "is 7; expected `str`, got `int`: put it in quotes"),
        ("models: [{source: o/n, max_batch: 0}]", "max_batch of model 1 in"),
        ("models: [{source: o/n, max_context: -5}]", "is -5; expected `int` >= 16"),
        ("models: [{source: o/n, aliases: [a, 7]}]", "aliases of model 1 in"),
        ("models: [o/n, p/n]", "models 'o/n' and 'p/n' are both called 'n'; give one another name, as PATH_OR_ID=NAME"),
        ("port: 1\nport: 2", "port occurs twice"),
        ("models: [{source: o/n, pin: true, pin: false}]", "pin occurs twice"),
        ("models: [{source: o/n, kv_cache_bytes: lots}]", "expected a number of bytes"),
        ("models: [{source: o/n, kv_cache_bytes: 99999999T}]", "kv_cache_bytes of model 1 in"),
        ("models: [{source: o/n, kv_cache_bytes: 99999999999999999999}]", "kv_cache_bytes of model 1 in"),
        ("models: [/no/such/folder]", "does not exist"),
        ("models: [{source: o/n, name: ''}]", "model 'o/n' is called ''; expected letters, digits"),
        ("models: ['o/n=my model']", "is called 'my model'; expected letters, digits"),
        ("models: [{source: o/n, aliases: [-x]}]", "is called '-x'"),
        ("models: [o/n, {source: p/m, aliases: [n]}]", "models 'o/n' and 'p/m' are both called 'n'"),
        ("models: [{source: o/n, aliases: [x]}, {source: p/m, aliases: [x]}]", "both called 'x'"),
        ("allowed_hosts: [~]", "expected texts: put the entry in quotes"),
    ],
)
def test_a_wrong_file_is_refused_by_place(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        gather({}, {}, config=write(tmp_path, text))
    assert complaint in str(caught.value)


def test_no_key_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"api_keys in .* expected a list") as caught:
        gather({}, {}, config=write(tmp_path, "api_keys: a-secret-of-mine"))
    assert "a-secret-of-mine" not in str(caught.value)


def test_a_key_of_digits_is_the_one_that_was_written(tmp_path: Path) -> None:
    """In a YAML file, an API key that consists of digits must be quoted, because YAML reads 012345670 as an octal number. An unquoted key
    of digits is refused."""
    assert gather({}, {}, config=write(tmp_path, "api_keys: ['012345670']"))[0].api_keys == ("012345670",)
    with pytest.raises(SettingsError, match="expected texts") as caught:
        gather({}, {}, config=write(tmp_path, "api_keys: [012345670]"))
    assert "2739128" not in str(caught.value)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert gather({}, {}, config=write(tmp_path, "# nothing"))[0] == ServerSettings()


def test_a_model_needs_a_source() -> None:
    with pytest.raises(SettingsError, match=r"expected PATH_OR_ID\[=NAME\]"):
        model_spec("=name")


LINKS = {  # variables that Kubernetes sets in a pod for two Services, relaxserve and relaxserve-canary
    "RELAXSERVE_SERVICE_HOST": "10.0.0.11",
    "RELAXSERVE_SERVICE_PORT": "8000",
    "RELAXSERVE_SERVICE_PORT_HTTP": "8000",
    "RELAXSERVE_PORT": "tcp://10.0.0.11:8000",
    "RELAXSERVE_PORT_8000_TCP": "tcp://10.0.0.11:8000",
    "RELAXSERVE_PORT_8000_TCP_PROTO": "tcp",
    "RELAXSERVE_PORT_8000_TCP_PORT": "8000",
    "RELAXSERVE_PORT_8000_TCP_ADDR": "10.0.0.11",
    "RELAXSERVE_CANARY_SERVICE_HOST": "10.0.0.12",
    "RELAXSERVE_CANARY_PORT": "tcp://10.0.0.12:8000",
    "RELAXSERVE_CANARY_PORT_8000_UDP_ADDR": "10.0.0.12",
}


def test_variables_that_kubernetes_injects_for_a_service_are_no_settings() -> None:
    """Kubernetes sets variables for a Service called `relaxserve` that look like settings. The server starts nevertheless, and does not use
    their values as its address."""
    assert set(service_links(LINKS)) == LINKS.keys()
    settings, _ = gather({}, {**LINKS, "RELAXSERVE_STRICT": "1"})
    assert settings.port == ServerSettings().port and settings.strict
    config = {"RELAXSERVE_PORT": "9000", "RELAXSERVE_CONFIG": ""}
    assert service_links(config) == () and gather({}, config)[0].port == 9000


HUGE = "0x" + "f" * 5000  # has more digits than Python writes or reads in decimal


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("[" * 5000 + "]" * 5000, "nested too deeply", id="nested lists"),
        pytest.param("\n".join(" " * level + "a:" for level in range(1200)), "nested too deeply", id="nested mappings"),
        pytest.param("port: " + "9" * 5000, "is not YAML: Exceeds the limit", id="5,000 digits"),
        pytest.param("port: " + "1:" * 3000 + "1", "port .* is an integer of thousands of digits; expected a whole number", id="base 60"),
        pytest.param(f"port: {HUGE}", "port .* is an integer of thousands of digits; expected a whole number", id="hexadecimal"),
        pytest.param(f"max_body_bytes: {HUGE}", "expected a number of bytes", id="bytes"),
        pytest.param(f"models: {HUGE}", "models .* expected a list", id="list"),
        pytest.param(f"models: [{HUGE}]", r"model 1 .* expected PATH_OR_ID\[=NAME\]", id="model"),
        pytest.param(
            f"models: [{{source: o/a, max_batch: {HUGE}}}]", "max_batch of model 1 .* is an integer of thousands of digits", id="field"
        ),
        pytest.param("models: [{source: o/a, kv_cache_bytes: '" + "9" * 400 + "'}]", "kv_cache_bytes of model 1", id="size of a model"),
        pytest.param("max_body_bytes: '" + "9" * 400 + "'", "max_body_bytes .* expected a number of bytes", id="size"),
        pytest.param("port: 2026-99-99", "is not YAML: month must be", id="date"),
        pytest.param(f"? {HUGE}\n: 1", "is no setting", id="key"),
        pytest.param('state_file: "\\0"', "state_file .* expected a path", id="zero byte"),
        pytest.param('host: "\\ud800"', "host .* expected a text", id="surrogate"),
        pytest.param("mcp_servers: ['a=http://[1:2]/']", r"mcp_servers has 'a=http://\[1:2\]/': '1:2' does not appear", id="address"),
        pytest.param("mcp_servers: ['a=http://b:99999/']", r"mcp_servers has 'a=http://b:99999/': Port out of range", id="port"),
    ],
)
def test_a_hostile_configuration_is_refused_in_one_line(text: str, complaint: str, tmp_path: Path) -> None:
    """YAML that is nested thousands deep, numbers of thousands of digits and other hostile values are refused by a message of less than 600
    characters."""
    with pytest.raises(SettingsError, match=complaint) as refused:
        gather({}, {}, config=write(tmp_path, text))
    assert len(str(refused.value)) < 600


def test_a_model_of_the_file_may_have_stages(tmp_path: Path) -> None:
    _, (spec,) = gather({}, {}, config=write(tmp_path, "models: [{source: demo, stages: ['10.0.0.2:7070', local]}]"))
    assert spec.stages == ("10.0.0.2:7070", "local")
    assert stages_of("2") == ("local", "local")


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ("[local]", "stages is 'local', one process; expected at least two stages"),
        ("[local, host2]", "stages is 'local,host2'; the last stage samples"),
        ("['host:99999', local]", "'host:99999' is no place of a stage"),
        ("2", "expected `array`"),
    ],
)
def test_wrong_stages_are_refused_before_a_model_loads(stages: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        gather({}, {}, config=write(tmp_path, f"models: [{{source: demo, stages: {stages}}}]"))
    assert complaint in str(refused.value)


def test_wrong_stages_of_the_command_line_name_the_option() -> None:
    with pytest.raises(SettingsError, match="--stages: stages is 'local', one process"):
        stages_of("local")
