"""The defaults of a model as values: what is read, what is refused, what wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.api.request.schema import ChatBody
from server.defaults import THINKING, BesideModel, Defaults, DefaultsError, read_texts, read_values


def test_the_fields_are_those_of_a_request():
    """Each default is a field of a request and has the field's limits, as the documentation says: no default may mean what no request can
    ask for."""
    own = {"system", "template"}  # a request has these among its messages, or cannot have them
    assert set(Defaults.__struct_fields__) - own <= set(ChatBody.model_fields)
    bad = {"temperature": 101, "top_p": 1.1, "top_k": -2, "min_p": -0.1, "typical_p": 0, "repetition_penalty": 1e-40, "max_tokens": 2**31}
    bad |= {"frequency_penalty": 2.1, "presence_penalty": -2.1, "stop": 5, "enable_thinking": "x", "reasoning_effort": "much"}
    assert set(bad) == set(Defaults.__struct_fields__) - own
    for name, value in bad.items():
        with pytest.raises(DefaultsError, match=name):
            read_values({name: value}, "here")
        with pytest.raises(ValueError, match=name):
            ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], name: value})


def test_an_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(DefaultsError, match=r"'temprature' in NAME is no default \(is temperature meant\?\); expected system, .*remove it"):
        BesideModel.read(b"temprature = 1", "NAME")
    with pytest.raises(DefaultsError, match=r"NAME is not TOML: .*line 1.*; correct it, or remove it"):
        BesideModel.read(b"temperature: 1", "NAME")
    with pytest.raises(DefaultsError, match=r"top_p in NAME is 2: expected `float` <= 1.0; correct or remove it"):
        BesideModel.read(b"top_p = 2", "NAME")
    with pytest.raises(DefaultsError, match="max_context"):
        read_values({"max_context": 4096}, "a request")  # a load has a field of this name


@pytest.mark.parametrize("content", [b"\xff", b"a = " + b"[" * 5000, b"temperature = nan", b"temperature = inf", b"x" * (1 << 21)])
def test_no_content_of_a_file_is_a_traceback(content):
    with pytest.raises(DefaultsError):
        BesideModel.read(content, "NAME")


def test_a_file_has_all_kinds_of_values():
    content = b'system = "Be brief."\nstop = "END"\ntop_k = 20\nenable_thinking = false\nmax_context = 8192'
    found = BesideModel.read(content, "NAME")
    assert found.given == {"system": "Be brief.", "stop": ("END",), "top_k": 20, "enable_thinking": False}
    assert found.max_context == 8192 and found.sampling == {"top_k": 20} and found.thinking == {"enable_thinking": False}


def test_values_of_a_command_line(tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("Speak\nlike a pirate.")
    texts = ["temperature=0.2", "top_k=40", "stop=END", "stop=a=b", "enable_thinking=false", f"system=@{tmp_path / 'prompt.txt'}"]
    found = read_texts(texts, "--default")
    assert found == Defaults(temperature=0.2, top_k=40, stop=("END", "a=b"), enable_thinking=False, system="Speak\nlike a pirate.")
    for text, message in (
        ("temperature", "--default is 'temperature'; expected NAME=VALUE"),
        ("temperature=warm", "temperature in --default is 'warm'"),
        ("colour=red", "'colour' in --default is no default"),
        ("system=@/nowhere/x", "@/nowhere/x, which cannot be read: No such file or directory"),
    ):
        with pytest.raises(DefaultsError) as caught:
            read_texts([text], "--default")
        assert message in str(caught.value)


def test_the_higher_value_wins_field_by_field():
    file, given = Defaults(temperature=0.1, system="file", stop=("a",)), Defaults(system="given", stop=())
    assert given.over(file) == Defaults(temperature=0.1, system="given", stop=())


def test_the_fingerprint_names_the_defaults():
    """Two servers with equal fingerprints give equal bytes, so other defaults need another fingerprint."""
    plain = "fp_0123456789abcdef"
    assert Defaults().mark(plain) == plain
    marks = {each.mark(plain) for each in (Defaults(), Defaults(temperature=0.0), Defaults(temperature=0.5), Defaults(system="0"))}
    assert len(marks) == 4
    assert Defaults(top_k=1).mark(plain) == Defaults(top_k=1).mark(plain) != Defaults(top_k=1).mark("fp_another")


def test_an_effort_says_whether_to_think():
    assert Defaults(reasoning_effort="none").thinking == {"reasoning_effort": "none", "enable_thinking": False}
    assert Defaults(reasoning_effort="low", enable_thinking=False).thinking == {"reasoning_effort": "low", "enable_thinking": False}
    assert set(Defaults(reasoning_effort="low").thinking) == set(THINKING)
