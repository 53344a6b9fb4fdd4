"""Recorded figures are read back unchanged, and the pages of the machines contain them."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from deploy.bench.measure import Figure, report
from server.settings import SettingsError
from tests.lab.reporting.chart import CHART, STEPS, comparisons, drawn
from tests.lab.reporting.day import read_day
from tests.lab.reporting.record import Record, read_all
from tests.lab.reporting.report import FILE, MOST_ROWS, PAGES, TERMS, pages

FIGURES = [
    Figure("first token", 12.34, "ms", 20.0),
    Figure("tokens", 98765.4, "tokens/s", 1e5, at_least=True, note="a|b"),
    Figure("x", 0.5, ""),
]


def record(capsys, figures=FIGURES, **fields):
    report(figures, as_json=True)
    return Record(
        **{
            "benchmark": "one",
            "arguments": ("--clients", "2"),
            "machine": "A Processor, 2 cores",
            "date": "2026-01-02",
            "commit": "abc",
            "found": json.loads(capsys.readouterr().out),
            **fields,
        }
    )


def written(records) -> str:
    """Return the text of the only machine's page."""
    (text,) = (text for file, text in pages(records).items() if file != FILE)
    return text


def test_the_pages_of_this_checkout_are_made_of_its_records():
    expected = pages(read_all())
    assert {*PAGES.glob("*.md")} == expected.keys() - {FILE}
    assert all(file.read_text() == text for file, text in expected.items()), "run: python -m tests.lab report"


def test_the_front_page_names_machines_and_compares_peers(capsys):
    text = pages([model_record(capsys), model_record(capsys, machine="B", peers=()), record(capsys)])[FILE]
    assert "| A | quantize int8 | llama.cpp 1.2 | 2.5 | 2.5 | 2.5 | 2.5 | 2.5 |" in text
    assert "| [A Processor, 2 cores](docs/benchmarks/a-processor-2-cores.md) | 1 | 2026-01-02 to 2026-01-02 |" in text
    assert "[B](docs/benchmarks/b.md)" in text and text.count("| A |") == 1


def test_the_front_page_has_a_row_per_real_model(capsys):
    figures = [
        Figure("m: first start", 4.0, "s", 5.0),
        Figure("m: decode of 1 / llama.cpp's", 1.25, "", 1.15, True),
        Figure("m: KL", 1e-4, "", 5e-4, note="llama.cpp 0.003"),
        Figure("m: KL / llama.cpp's", 0.033, "", 0.25),
    ]
    text = pages([record(capsys, figures, benchmark="real")])[FILE]
    assert "| machine | model | decode of 1 | KL | first start |" in text
    assert "| A Processor, 2 cores | m | 1.25 | 0.0001 (0.003) | 4.0 s |" in text


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.lab.reporting.record.RESULTS", tmp_path)
    return tmp_path


def test_a_record_is_read_as_it_was_kept(results, capsys):
    kept = [record(capsys), record(capsys, arguments=()), record(capsys, machine="Another (R) Processor")]
    assert kept[0].keep() == results / "a-processor-2-cores" / "one-clients-2.json"
    for one in kept[1:]:
        one.keep()
    assert sorted(read_all(), key=str) == sorted(kept, key=str)


def test_a_later_run_takes_the_place_of_an_earlier_one(results, capsys):
    record(capsys, date="2026-01-01").keep()
    record(capsys).keep()
    assert [one.date for one in read_all()] == ["2026-01-02"]


def test_figures_stand_beside_their_goals(capsys):
    text = written([record(capsys)])
    assert "# A Processor, 2 cores" in text and "`python -m tests.lab one --clients 2`, 2026-01-02, commit abc." in text
    assert "| first token | 12.3 ms | <= 20 | yes |  |" in text
    assert "| tokens | 98,765 tokens/s | >= 100000 | no | a\\|b |" in text
    assert "| x | 0.5 |  |  |  |" in text


def test_of_many_figures_the_largest_are_shown(capsys):
    text = written([record(capsys, [Figure(f"f{number}", number, "ms", 5.0) for number in range(100)])])
    assert text.count("| f") == MOST_ROWS + 1 and "f99" in text and "f59" not in text and f"the {MOST_ROWS} largest of 100" in text


def test_kernels_that_take_most_of_their_step_are_shown(capsys):
    limits = {"weights": {"bytes_per_s": 3e10, "flops": 2e12}, "others": {"bytes_per_s": 3e10, "flops": 1e11}}

    def row(step, kernel, seconds):
        return {"step": step, "kernel": kernel, "launches": 2, "seconds": seconds, "num_bytes": 3e6, "operations": 4e9, "share": 0.5}

    rows = [
        row("prefill 8", "small", 0.001),
        row("prefill 8", "large", 0.03),
        row("prefill 8", "tiny", 0.0001),
        row("decode", "tiny", 0.0001),
    ]
    text = written([record(capsys, benchmark="kernels", found={"limits": limits, "rows": rows})])
    assert "; limits of weights: 30 GB/s of memory bandwidth, 2000 GFLOP/s; limits of others: 30 GB/s" in text
    shown = [line.split(" | ")[:4] for line in text.splitlines() if line.startswith(("| prefill", "| decode"))]
    assert shown == [["| prefill 8", "large", "2", "30"], ["| prefill 8", "small", "2", "1"], ["| decode", "tiny", "2", "0.1"]]


def test_rows_and_nested_limits_become_tables(capsys):
    found = {
        "limits": {"weights": {"bytes_per_s": 3e10}},
        "rows": [{"name": "decode", "share": 0.913, "inner": [1]}, {"name": "prefill", "flag": True}],
        "peers": {},
    }
    text = written([record(capsys, found=found)])
    assert "**limits: weights**: `python -m tests.lab one" in text and "| 30,000,000,000 |" in text
    assert "| name | share | flag |" in text and "| decode | 0.913 |  |" in text and "| prefill |  | yes |" in text


def row(name, tokens_per_s):
    return {"name": name, "tokens_per_s": tokens_per_s, "num_bytes": 2e6, "operations": 3e9, "share": 0.5}


def model_record(capsys, *, machine="A", arguments=("--quantize", "int8"), peers=("llama-cpp-python",), steps=tuple(STEPS)):
    rows = [row(step, 100.0) for step in steps]
    compared = {name: {"difference": 0.01, "rows": [row(step, 40.0) for step in steps], "version": "1.2"} for name in peers}
    found = {"limits": {"bytes_per_s": 3e10, "flops": 2e11}, "rows": rows, "peers": compared}
    return record(capsys, benchmark="model", machine=machine, arguments=arguments, found=found)


def test_a_model_and_its_peers_share_a_table(capsys):
    text = written([model_record(capsys, steps=("prefill 512",))])
    assert f"## model, quantize int8\n\n{TERMS['model']}\n\n`python -m tests.lab model" in text
    assert "commit abc; limits: 30 GB/s of memory bandwidth, 200 GFLOP/s; llama.cpp 1.2." in text
    assert "| MB read | GFLOP | llama.cpp, tokens per second | speedup over llama.cpp |" in text
    assert "| prefill 512 | 100 | 0.5 | 2 | 3 | 40 | 2.5 |" in text
    assert "| prefill 512 | 100 | 0.5 | 2 | 3 |\n" in written([model_record(capsys, steps=("prefill 512",), peers=())])


def test_a_model_in_turns_with_another_has_a_second_table(capsys):
    quartiles = {"limit": {"lower": 0.5, "median": 0.75, "upper": 0.875}, "peak": {"lower": 0.25, "median": 0.5, "upper": 0.625}}
    plain = model_record(capsys, steps=("prefill 512",), peers=())
    beside = {"shape": "0.5b", "rows": [{"name": "prefill 512", **quartiles, "turns": 12}]}
    text = written([replace(plain, arguments=("--beside", "0.5b"), found={**plain.found, "beside": beside})])
    assert "| prefill 512 | 100 | 0.5 | 2 | 3 |\n" in text
    assert "**in turns with 0.5b**: `python -m tests.lab model --beside 0.5b`, 2026-01-02, commit abc; medians and quartiles" in text
    assert "| step | share of the limit / that of 0.5b | share of the peak / that of 0.5b | turns |" in text
    assert "| prefill 512 | 0.75 (0.5 to 0.875) | 0.5 (0.25 to 0.625) | 12 |\n" in text
    assert "in turns with" not in written([plain])


def test_the_chart_of_this_checkout_is_made_of_its_records():
    assert CHART.read_text() == drawn(read_all()), "run: python -m tests.lab report"


def test_the_chart_shows_five_comparisons_of_one_machine(capsys):
    bf16 = model_record(capsys, arguments=(), peers=("torch",))
    lesser = model_record(capsys, arguments=("--target", "x86-64-v3"))
    chosen = comparisons([model_record(capsys), bf16, lesser, model_record(capsys, machine="B", steps=("prefill 512",)), record(capsys)])
    assert [one.step for one in chosen] == [title for title in STEPS.values() for _ in range(2)][:5]
    assert {(one.machine, one.weights, one.peer) for one in chosen} == {("A", "bf16", "PyTorch bfloat16"), ("A", "int8", "llama.cpp Q8_0")}
    assert {one.ours / one.theirs for one in chosen} == {2.5}


def test_the_chart_is_valid_xml_with_bars_to_scale(capsys):
    root = ElementTree.fromstring(drawn([model_record(capsys, machine="A & B")]))
    bars = [float(bar.attrib["width"]) for bar in root.findall("{*}rect")]
    assert len(bars) == 10 and bars[0] == 2.5 * bars[1]
    assert "100 (2.50x)" in {text.text for text in root.findall("{*}text")}
    assert ElementTree.fromstring(drawn([])).findall("{*}rect") == []


def day(folder, *, is_rehearsal=False, steps=None):
    """Write the lines of a day with a card."""
    told = {"machine": "A Processor, a GPU", "date": "2026-01-02", "commit": "abc", "is_rehearsal": is_rehearsal}
    found = {
        "machine": [told],
        "rows": [],
        "shape bf16": [{"copies_bytes_per_s": 3e12}, {"step": "decode 1 x 1024", "share_of_copies": 0.875, "kernels": [{"seconds": 1.0}]}],
    }
    lines = [
        {"step": name, "outcome": "passed", "status": 0, "seconds": 2.5, "said": "6 passed" if name == "rows" else "", "found": rows}
        for name, rows in (steps or found).items()
    ]
    lines.append({"step": "torn", "outcome": "died", "status": -11, "seconds": 1.0, "said": "", "found": []})
    file = folder / "day.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_lines_of_a_day_with_a_card_become_a_record(results, tmp_path):
    kept = read_day(day(tmp_path)).keep()
    assert kept == results / "a-processor-a-gpu" / "cuda-day.json"
    text = written(read_all())
    assert f"## cuda-day\n\n{TERMS['cuda_day']}" in text
    assert "| rows | passed | 2.5 | 6 passed |" in text and "| torn | died | 1 |  |" in text
    assert "**shape bf16**: `python -m tests.lab cuda-day`, 2026-01-02, commit abc." in text
    assert "| decode 1 x 1024 | 0.875 |" in text


def test_lines_of_a_rehearsal_or_of_no_machine_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"day.jsonl is of a rehearsal on a card in software.* name the lines of a visit"):
        read_day(day(tmp_path, is_rehearsal=True))
    with pytest.raises(SettingsError, match=r"day.jsonl has no result of the step 'machine'.* run the day again"):
        read_day(day(tmp_path, steps={"rows": []}))
