"""Names of files: spaces, other scripts, upper case, equals signs, links, and names that no request could use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.commands import app
from deploy.settings import check_models, gather, model_spec
from server.models.sources import resolve
from server.models.state import ModelSpec
from server.settings import ServerSettings, SettingsError
from tests.deploy.gguf_files import write_gguf
from tests.e2e.user_files.bring import answers_as, refused, write_folder


@pytest.mark.parametrize(
    ("file", "name", "aliases"),
    [
        ("Tiny.gguf", "Tiny", ("Tiny.gguf",)),
        ("My Model (Q4_K_M).gguf", "My-Model-Q4_K_M", ()),
        ("Größe.gguf", "Groe", ()),
        ("a=b.gguf", "a-b", ()),
        ("-x-.gguf", "x", ()),
        ("TINY.Q4_K.gguf", "TINY.Q4_K", ("TINY.Q4_K.gguf",)),
        ("with'quotes\".gguf", "with-quotes", ()),
    ],
)
def test_a_file_is_served_whatever_its_name(file: str, name: str, aliases: tuple[str, ...], tmp_path: Path) -> None:
    write_gguf(tmp_path / file)
    spec = answers_as(tmp_path / file, "qwen2").spec
    assert (spec.name, spec.aliases) == (name, aliases)
    chosen = model_spec(f"{tmp_path / file}=mine")
    assert (chosen.name, chosen.source) == ("mine", spec.source)


@pytest.mark.parametrize("folder", ["My Model", "模型/tiny", "a=b", "UPPER/Lower", "tiny.gguf"])
def test_a_folder_is_served_whatever_its_name(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).parent.mkdir(exist_ok=True)
    answers_as(write_folder(tmp_path / folder), "llama")
    assert answers_as(f"{tmp_path / folder}/", "llama").spec.source == str(tmp_path / folder)


def test_a_name_without_a_letter_needs_another(tmp_path: Path) -> None:
    write_gguf(tmp_path / "模型.gguf")
    refused(tmp_path / "模型.gguf", "is called '模型'; expected letters, digits .*; give one as PATH_OR_ID=NAME")
    check_models([model_spec(f"{tmp_path / '模型.gguf'}=tiny")])


def test_links_lead_to_models(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    write_gguf(tmp_path / "0123abcd")
    (tmp_path / "latest").symlink_to("model")
    (tmp_path / "Tiny.gguf").symlink_to("0123abcd")
    assert answers_as(tmp_path / "latest", "llama").spec.name == "model"
    assert answers_as(tmp_path / "Tiny.gguf", "qwen2").spec.name == "Tiny", "a file is called by its link"


def test_a_link_below_the_model_root_keeps_its_name_and_may_not_lead_out_of_it(tmp_path: Path) -> None:
    (root := tmp_path / "root").mkdir()
    write_gguf(root / "0123abcd")
    (root / "Tiny.gguf").symlink_to("0123abcd")
    settings = ServerSettings(model_root=root)
    assert resolve("Tiny.gguf", settings) == str(root / "Tiny.gguf")
    shutil.move(root / "0123abcd", tmp_path / "0123abcd")
    (root / "Tiny.gguf").unlink()
    (root / "Tiny.gguf").symlink_to("../0123abcd")
    with pytest.raises(Exception, match="lies outside the model root"):
        resolve("Tiny.gguf", settings)


@pytest.mark.parametrize("name", ["loop.gguf", "x" * 300 + ".gguf", "nothing.gguf", "no/such/folder", "./Tiny.GGUF"])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    refused(name, r"does not exist; expected a folder|cannot be read: File name too long")
    for command in ("inspect", "generate -p hi", "compile"):
        result = CliRunner().invoke(app, [*command.split(), name])
        assert result.exit_code != 0 and type(result.exception).__name__ in ("LoadError", "SettingsError"), result.exception


# --- one model twice ------------------------------------------------------------------------------------------------------


def test_one_model_may_be_served_under_two_names(tmp_path: Path) -> None:
    write_gguf(tmp_path / "Tiny.gguf")
    _, specs = gather({}, {}, models=[f"{tmp_path}/Tiny.gguf=a", f"{tmp_path}/Tiny.gguf=b"])
    assert [(spec.name, spec.source) for spec in specs] == [(name, str(tmp_path / "Tiny.gguf")) for name in "ab"]
    assert not ModelSpec.loads_like(*specs), "each has a worker of its own"


@pytest.mark.parametrize("second", ["Tiny.gguf", "other/Tiny.gguf", "other/Tiny"])
def test_two_models_of_one_name_are_refused(second: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "Tiny.gguf")
    (tmp_path / "other" / "Tiny").mkdir(parents=True)
    write_gguf(tmp_path / "other" / "Tiny.gguf")
    with pytest.raises(SettingsError, match=r"are both called 'Tiny'; give one another name, as PATH_OR_ID=NAME"):
        gather({}, {}, models=[f"{tmp_path}/Tiny.gguf", f"{tmp_path}/{second}"])


def test_two_forms_of_one_model_are_two_models(tmp_path: Path) -> None:
    """A configuration file gives each its own name and form; each form is kept by itself."""
    folder = write_folder(tmp_path / "model")
    (tmp_path / "models.yaml").write_text(
        f"models:\n- {{source: {folder}, name: exact, quantize: f32}}\n- {{source: {folder}, name: small, quantize: int8}}\n"
    )
    _, (exact, small) = gather({}, {}, config=tmp_path / "models.yaml")
    assert (exact.name, exact.quantize, small.name, small.quantize) == ("exact", "f32", "small", "int8")
    exact_logits, small_logits = (answers_of(spec) for spec in (exact, small))
    again = answers_of(exact)
    assert (exact_logits == again).all() and (exact_logits != small_logits).any()


def answers_of(spec: ModelSpec) -> object:
    from tests.e2e.user_files.bring import bring

    return bring(spec.source, quantize=spec.quantize).logits([1, 2, 3])
