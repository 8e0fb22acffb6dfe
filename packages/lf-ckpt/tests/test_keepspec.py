"""Retention rules as JSON and as a line of text: both ways, or one typed error."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_retention import RULES, few

import lf_ckpt
from lf_ckpt import AllOf, Best, Candidate, Every, EverySeconds, Last, Phases
from lf_ckpt.retention import Rule


@few
@given(RULES)
def test_rules_are_json_both_ways(keep: list[Rule]) -> None:
    text = json.dumps(lf_ckpt.keep_as_json(keep))

    assert list(lf_ckpt.keep_from_json(json.loads(text))) == keep
    assert list(lf_ckpt.keep_from_json(json.loads(text)["keep"])) == keep


def test_the_json_form_is_what_the_documentation_shows() -> None:
    keep = [Last(3), Every(1000), Best("loss", 2), Phases(((0, 5), (1000, 20))), AllOf([EverySeconds(60)])]

    assert lf_ckpt.keep_as_json(keep) == {
        "version": 1,
        "keep": [
            {"last": 3},
            {"every": 1000},
            {"best": {"metric": "loss", "count": 2, "mode": "min"}},
            {"phases": [[0, 5], [1000, 20]]},
            {"all": [{"every_seconds": 60}]},
        ],
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["last", "best", "metric", "any", "phases", "version", "keep"]), inner
        )
    ),
)


@few
@given(JSON)
def test_any_json_gives_rules_or_one_typed_error(data: object) -> None:
    try:
        rules = lf_ckpt.keep_from_json(data)
    except lf_ckpt.PolicyError:
        return
    assert lf_ckpt.keep_from_json(lf_ckpt.keep_as_json(rules)) == rules


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"version": 2, "keep": []}, "version 2"),
        ({"version": 1, "rules": []}, "unknown key 'rules'"),
        ([{"lsat": 3}], "no rule 'lsat'"),
        ([{"last": 3, "every": 5}], "write one of last"),
        ([{"best": {"count": 2}}], "give metric"),
        ([{"any": [{"last": 0}]}], "at least one"),
        ("last:3", "where a list belongs"),
    ],
)
def test_bad_json_is_named(data: object, message: str) -> None:
    with pytest.raises(lf_ckpt.PolicyError, match=message):
        lf_ckpt.keep_from_json(data)


def test_rules_of_your_own_have_no_json() -> None:
    class Mine:
        def wanted(self, steps: Sequence[Candidate]) -> Collection[int]:
            return ()

    with pytest.raises(lf_ckpt.PolicyError, match="JSON form"):
        lf_ckpt.keep_as_json([Mine()])


def test_rules_as_one_line_of_text() -> None:
    text = "last:3, every:1000,every_seconds:60,best:loss,best:acc:2:max,phases:0/5:1000/20"

    assert lf_ckpt.parse_keep(text) == (
        Last(3),
        Every(1000),
        EverySeconds(60),
        Best("loss"),
        Best("acc", 2, "max"),
        Phases(((0, 5), (1000, 20))),
    )


@pytest.mark.parametrize(
    "text", ["", "last", "last:x", "last:3:4", "first:3", "best:", "phases:5", "phases:0/5/7", "last:3,"]
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(lf_ckpt.PolicyError):
        lf_ckpt.parse_keep(text)
