"""Tests for the values of --filter, --language and --clean, and the messages for invalid ones."""

import pytest

from pretrain.errors import InputError
from pretrain_tools.preparation.cleaning.filters import FILTERS, parse_filter, read_cleaning
from pretrain_tools.preparation.cleaning.published import GopherQuality
from pretrain_tools.preparation.cleaning.stages import TextBatch
from pretrain_tools.preparation.plan import PreparationOptions


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("gopher_quality", GopherQuality()),
        ("gopher_quality(min_words=30, max_symbols=off)", GopherQuality(min_words=30, max_symbols=None)),
        (" gopher_quality( 30 ,stop_words=der+die ) ", GopherQuality(min_words=30, stop_words=("der", "die"))),
        ("gopher_quality(min_word_length=2.5)", GopherQuality(min_word_length=2.5)),
    ],
)
def test_parameters_are_named_or_set_the_first_one(given, expected):
    assert parse_filter(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gopher_qualty", "no such filter; did you mean gopher_quality"),
        ("gopher_quality(min_word=3)", "no parameter 'min_word'; did you mean min_words"),
        ("gopher_quality(min_words=many)", "min_words: Input should be a valid integer"),
        ("gopher_quality(min_words=1, min_words=2)", "min_words is specified twice"),
        ("fineweb(short_line_characters=off)", "Input should be a valid integer"),
        ("c4(endings=maybe)", "endings: Input should be a valid boolean"),
        ("language", "languages: Field required"),
        ("language(en+xx)", "xx: unknown language"),
        ("classifier(no/such)", "is not a classifier from this version of Groundwork; train one"),
        ("gopher quality", "must be NAME, NAME"),
        ("no_such.py:keep", "No such file"),
        ("bench/my.filter.py:keep", "must not contain dots; rename"),
    ],
)
def test_invalid_filters_are_rejected_with_the_allowed_values(given, said):
    with pytest.raises(InputError, match=said):
        parse_filter(given)


def test_all_problems_are_reported_together(tmp_path):
    (tmp_path / "urls.py").write_text("def keep(text, url):\n    return True\n")
    with pytest.raises(InputError) as refused:
        read_cleaning(["c5", "c4", "c4", f"{tmp_path}/urls.py:keep"], languages="xx", has_urls=False)
    assert len(refused.value.problems) == 4
    assert any("--filter c4: specified twice" in problem for problem in refused.value.problems)
    assert any("requires --url_field" in problem for problem in refused.value.problems)


def test_a_function_with_a_url_parameter_gets_the_url(tmp_path):
    (tmp_path / "mine.py").write_text("def keep(text, url):\n    return url is None or 'bad.example' not in url\n")
    batch = TextBatch([b"one", b"two", b"three"], ["http://www.bad.example/x", "http://good.example", None])
    assert parse_filter(f"{tmp_path}/mine.py:keep").judge(batch).removed == {0: ""}


def test_a_function_whose_text_is_not_unicode_is_reported(tmp_path):
    (tmp_path / "mine.py").write_text("def keep(text):\n    return text + chr(0xD800)\n")
    with pytest.raises(InputError, match=r"mine\.py:keep: failed with UnicodeEncodeError"):
        parse_filter(f"{tmp_path}/mine.py:keep").judge(TextBatch([b"one"], [None]))


def test_clean_is_finewebs_set_and_given_filters_replace_its_own():
    names = ["language", "gopher_quality", "gopher_repetition", "c4", "fineweb", "personal_data"]
    clean = read_cleaning([], clean=True).as_plan()
    assert [stage["name"] for stage in clean] == names
    assert clean[0]["languages"] == ("en",) and clean[1]["min_stop_words"] == 2 and clean[3]["endings"] is False
    german = read_cleaning(["fineweb(max_short_lines=0.5)"], languages="de", clean=True).as_plan()
    assert german[0]["languages"] == ("de",) and german[1]["min_stop_words"] is None
    assert [stage["name"] for stage in german] == [*names[:4], "personal_data", "fineweb"]
    assert german[-1]["max_short_lines"] == 0.5
    assert read_cleaning([]) is None


def test_every_filter_records_its_name_and_parameters_in_json():
    import json

    for name, filter_class in FILTERS.items():
        assert filter_class.__doc__ and filter_class.label == name
    plan = PreparationOptions(cleaning=read_cleaning([], clean=True)).as_plan()
    assert len(plan["cleaning"]) == 6 and json.loads(json.dumps(plan)) == plan
