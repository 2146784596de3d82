"""Reports are laid out without knowing them: units come from names."""

from dashboards.reports import report_of
from dashboards.templatetags.sparsefleet import NONE


def test_it_shows_scalars_as_facts_in_their_units() -> None:
    report = report_of(
        {"size_bytes": 2_500_000, "wall_s": 61, "hit_ratio": 0.5, "isa": "v3", "ok": True}
    )
    assert dict(report.facts) == {
        "Size": "2.50 MB",
        "Wall": "1 m 1 s",
        "Hit": "50.0 %",
        "Isa": "v3",
        "Ok": "yes",
    }


def test_it_leaves_out_what_is_empty() -> None:
    report = report_of({"base": None, "experts": {}, "notes": [], "title": "", "failed": 0})
    assert report.facts == (("Failed", "0"),)
    assert not report.tables


def test_it_begins_a_row_with_what_it_is_about() -> None:
    (table,) = report_of({"rows": [{"density": 1, "elements": 8, "value": "3:relu"}]}).tables
    assert table.columns == ("Value", "Density", "Elements")
    assert table.rows == (("3:relu", "1", "8"),)


def test_it_shows_lists_of_objects_as_tables() -> None:
    report = report_of(
        {"stages": [{"name": "parse", "took_ms": 3.0}, {"name": "pack", "cached": False}]}
    )
    (table,) = report.tables
    assert table.title == "Compiler stages"
    assert table.is_open
    assert table.columns == ("Name", "Took", "Cached")
    assert table.rows == (("parse", "3.00 ms", NONE), ("pack", NONE, "no"))


def test_it_shows_a_map_of_objects_as_a_table_with_names() -> None:
    (table,) = report_of({"kernels": {"gemm": {"n": 1}, "norm": {"n": 2}}}).tables
    assert table.rows == (("gemm", "1"), ("norm", "2"))


def test_it_shows_a_map_of_numbers_in_the_unit_of_its_name() -> None:
    sizes, weights = report_of({"sizes": {"plan": 1500}, "weight_bytes": {"w4": 2_000_000}}).tables
    assert sizes.rows == (("plan", "1.5 kB"),)
    assert weights.rows == (("w4", "2.00 MB"),)
    assert not sizes.is_open


def test_it_shows_a_list_of_words_one_a_row() -> None:
    (table,) = report_of({"notes": ["one", "two"]}).tables
    assert table.rows == (("one",), ("two",))


def test_it_leaves_out_rows_and_says_so() -> None:
    (table,) = report_of({"rows": [{"n": index} for index in range(250)]}).tables
    assert len(table.rows) == 200
    assert table.rows_left_out == 50


def test_it_is_empty_for_anything_that_is_no_object() -> None:
    assert not report_of(None)
    assert not report_of([1, 2])
    assert not report_of({})


def test_it_cuts_long_text() -> None:
    ((_, text),) = report_of({"note": "x" * 5_000}).facts
    assert len(text) == 200
