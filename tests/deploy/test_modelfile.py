"""Ollama's Modelfiles are read, and mistakes are named with their lines."""

from __future__ import annotations

import pytest

from deploy.modelfile import Modelfile, ModelfileError, read

TEXT = '''# a comment
FROM llama3.2
parameter temperature 0.5
PARAMETER num_ctx 4096
PARAMETER stop "<|end|>"
PARAMETER stop Human:

SYSTEM """You are Mario,
the plumber. # no comment"""
TEMPLATE "{{ messages }}"
'''


def test_a_modelfile_is_read() -> None:
    assert read(TEXT, "Modelfile") == Modelfile(
        "llama3.2",
        {"system": "You are Mario,\nthe plumber. # no comment", "template": "{{ messages }}"},
        {"temperature": 0.5, "num_ctx": 4096, "stop": ["<|end|>", "Human:"]},
    )
    assert read('FROM a\nSYSTEM """one line"""', "x").fields == {"system": "one line"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SYSTEM hi", "Modelfile has no FROM; expected FROM NAME"),
        ("FROM a\nADAPTER x", "Modelfile, line 2: ADAPTER is not supported; expected FROM, SYSTEM, TEMPLATE, PARAMETER: remove the line"),
        ("FRM a", "Modelfile, line 1: 'FRM' is no instruction; expected FROM"),
        ("FROM", "Modelfile, line 1: FROM has no value"),
        ("FROM a\nPARAMETER temperature", "Modelfile, line 2: PARAMETER temperature has no value"),
        ('FROM a\nSYSTEM """hi\nthere', 'Modelfile, line 2: the text that begins with """ does not end'),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ModelfileError) as refused:
        read(text, "Modelfile")
    assert str(refused.value).startswith(message)


def test_a_text_keeps_characters_that_are_no_line_feeds() -> None:
    text = "one\u2028two\x0cthree\x85four\nfive"
    assert read(f'FROM a\nSYSTEM """{text}"""', "Modelfile").fields["system"] == text


def test_tabs_separate_words_too() -> None:
    text = 'FROM\tllama3.2\nPARAMETER\ttemperature\t0.5\nPARAMETER \t stop \t"a b"\nSYSTEM\t"""one\n\ttwo"""'
    assert read(text, "Modelfile") == Modelfile("llama3.2", {"system": "one\n\ttwo"}, {"temperature": 0.5, "stop": ["a b"]})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("042", 42),
        ("-1", -1),
        ("+7", 7),
        (".5", 0.5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("00.5", 0.5),
        ("1e+2", 100.0),
        ("true", True),
        ("1e999", "1e999"),
        ("nan", "nan"),
        ("1_0", "1_0"),
        ("\u0663", "\u0663"),
        ("9" * 5000, "9" * 5000),
        ("-", "-"),
        (".", "."),
    ],
    ids=lambda value: str(value)[:9],
)
def test_numbers_are_those_that_ollama_reads(text: str, value: object) -> None:
    assert read(f"FROM a\nPARAMETER seed {text}", "Modelfile").parameters == {"seed": value}
