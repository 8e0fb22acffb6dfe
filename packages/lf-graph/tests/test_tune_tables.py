"""Tables as files (total parser, hostile texts) and what makes a measurement stale: the source of the kernels."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_cases import FAST, KEY, SLOW, tunable

import lf_graph
from lf_graph.kernels._tunable import Config, Tunable
from lf_graph.tune import Entry, TableError, Trial
from lf_graph.tune._card import Card, slug
from lf_graph.tune._source import source_hash
from lf_graph.tune._store import SHIPPED, Store, default_folder, shipped, write_atomically
from lf_graph.tune._table import Table, dump, parse

CARD = Card("NVIDIA H200", "570.1", "3.6.0")
ENTRY = Entry(
    "norm", KEY, "abc", FAST, 8.0, 10.0, True, (Trial(FAST, 8.0), Trial(SLOW, None, "not repeatable: 3"))
)
TABLE = Table(CARD).with_entry(ENTRY)

names = st.text(max_size=8)
numbers = st.integers(0, 2**31 - 1)
times = st.none() | st.floats(0, 1e9)
configs = st.builds(
    Config, st.dictionaries(names, numbers, max_size=3).map(lambda d: tuple(d.items())), numbers, numbers
)
keys = st.lists(st.integers() | names | st.booleans(), max_size=4).map(tuple)
trials = st.builds(Trial, configs, times, names)
entries = st.builds(
    Entry,
    names,
    keys,
    names,
    st.none() | configs,
    times,
    times,
    st.booleans(),
    st.lists(trials, max_size=2).map(tuple),
)


@given(st.lists(entries, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_table_comes_back_from_its_text(several: list[Entry]) -> None:
    table = Table(CARD)
    for entry in several:
        table = table.with_entry(entry)

    again = parse(dump(table))

    assert again.card == CARD
    assert dict(again.entries) == dict(table.entries)


@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_table_or_an_error(text: str) -> None:
    with pytest.raises(TableError):
        parse(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [p for k, v in inner for p in paths(v, (*at, k))]


def signed(document: dict[str, Any]) -> str:
    """The text with a right checksum, as a hostile writer would make it."""
    from lf_graph.tune import _table

    document.pop("checksum", None)
    return json.dumps({**document, "checksum": _table._checksum(document)})


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_value_with_a_right_checksum_is_a_table_or_an_error(data: st.DataObject) -> None:
    document = json.loads(dump(TABLE))
    place = data.draw(st.sampled_from([p for p in paths(document) if p and p[0] != "checksum"]))
    target = document
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = data.draw(json_values)

    try:
        table = parse(signed(document))
    except TableError:
        return
    assert all(isinstance(e, Entry) for e in table.entries.values())
    dump(table)  # what was accepted can be written


@given(st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_damaged_byte_is_noticed_or_harmless(at: int, byte: int) -> None:
    raw = bytearray(dump(TABLE).encode())
    raw[at % len(raw)] = byte
    try:
        table = parse(raw.decode("latin-1"))
    except TableError:
        return
    assert table == TABLE  # white space


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "no JSON"),
        ("9" * 5000, "no JSON"),
        ("7", "document is no object"),
        ('{"format": "x"}', "its format is 'x'"),
        ('{"format": "lf-graph tune", "version": 2}', "its version is 2, not 1"),
        ('{"format": "lf-graph tune", "version": 1}', "checksum"),
    ],
)
def test_errors_say_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(TableError, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("us", float("nan"), "no number of microseconds"),
        ("us", -1.0, "no number of microseconds"),
        ("key", [1.5], "a key has a part"),
        ("key", [[1]], "a key has a part"),
        ("complete", 1, "neither true nor false"),
        ("config", {"constants": {"B": True}, "num_warps": 4, "num_stages": 1}, "B is no integer"),
        ("config", {"constants": {}, "num_warps": 2**40, "num_stages": 1}, "num_warps is no integer"),
    ],
)
def test_fields_are_checked(field: str, value: Any, why: str) -> None:
    document = json.loads(dump(TABLE))
    document["entries"][0][field] = value
    with pytest.raises(TableError, match=why):
        parse(signed(document))


def test_keys_that_python_calls_equal_are_kept_as_they_are() -> None:
    table = Table(CARD).with_entry(Entry("t", (True, 1, "1"), "s", FAST, 1.0, 1.0, True))

    ((_, key),) = parse(dump(table)).entries
    assert [type(part) for part in key] == [bool, int, str]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, CARD)
    store.put(ENTRY)
    before = store.path.read_text()
    monkeypatch.setattr("os.replace", _fails)

    with pytest.warns(UserWarning, match="cannot be written"):
        store.put(Entry("other", KEY, "s", FAST, 1.0, 1.0, True))

    assert store.path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith((".write", ".json"))) == []


def _fails(*args: Any) -> None:
    raise OSError("disk full")


def test_tables_lie_in_the_users_cache_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LF_GRAPH_TUNE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert default_folder() == Path("/some/cache/lf-graph/tune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert default_folder() == Path("/somebody/.cache/lf-graph/tune")
    monkeypatch.setenv("LF_GRAPH_TUNE_DIR", "/mine")
    assert default_folder() == Path("/mine")


def test_card_driver_and_triton_make_the_file() -> None:
    assert CARD.file_name == "nvidia_h200-570.1-triton_3.6.0.json"
    assert Card("cpu", "", "").file_name == "cpu-triton.json"
    assert slug("../../etc") == "etc"


def test_a_shipped_table_counts_for_every_driver_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert shipped(CARD, tmp_path) == (None, "")
    write_atomically(tmp_path / "nvidia_h200.json", dump(TABLE))
    table, problem = shipped(Card("NVIDIA H200", "999", "9.9"), tmp_path)
    assert (dict(table.entries), problem) == (dict(TABLE.entries), "")  # type: ignore[union-attr]

    (tmp_path / "nvidia_h200.json").write_text("{}")
    table, problem = shipped(CARD, tmp_path)
    assert table is None
    assert "nvidia_h200.json is not used: its format is None" in problem


def test_every_shipped_table_can_be_read() -> None:
    for path in SHIPPED.glob("*.json"):
        assert path.name == f"{slug(parse(path.read_text()).card.name)}.json"


# -- the source ------------------------------------------------------------------------------------------------


class Jit:
    """As ``triton.jit`` leaves it: the function is in ``fn``."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


KERNEL = '''
FACTOR = 2
INTERPRETED = False

@Jit
def helper(x):
    return x * FACTOR

@Jit
def kernel(x):
    """Says what it does."""
    return helper(x) + 1  # why
'''


def hash_of(text: str, version: str = "") -> str:
    """The hash of ``kernel`` in a module with this text."""
    module = ModuleType("a_module_of_kernels")
    module.__dict__["Jit"] = Jit
    file = f"<{hash(text)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), module.__dict__)
    kernel = module.__dict__["kernel"]
    return source_hash(Tunable("t", (kernel,), None, None, None, version))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# why", "# another reason"),
        ("Says what it does", "Says it better"),
        ("\nFACTOR", "\n# a comment above\n\nFACTOR"),
        ("INTERPRETED = False", "INTERPRETED = True"),
    ],
)
def test_comments_places_and_the_interpreter_change_no_hash(old: str, new: str) -> None:
    assert hash_of(KERNEL.replace(old, new)) == hash_of(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"), [("+ 1", "+ 2"), ("x * FACTOR", "x + FACTOR"), ("FACTOR = 2", "FACTOR = 3")]
)
def test_code_helpers_and_constants_change_the_hash(old: str, new: str) -> None:
    assert hash_of(KERNEL.replace(old, new)) != hash_of(KERNEL)


def test_a_version_changes_the_hash() -> None:
    assert source_hash(tunable(version="2")) != source_hash(tunable())


HASHES = """
import json
from lf_graph.kernels._tunable import TUNABLES
from lf_graph.tune._run import load_kernels
from lf_graph.tune._source import source_hash
load_kernels()
print(json.dumps({name: source_hash(t) for name, t in TUNABLES.items()}))
"""


def test_tables_of_a_gpu_can_be_checked_where_kernels_are_interpreted() -> None:
    pytest.importorskip("triton")
    told = []
    for value in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", HASHES],
            env={**os.environ, "TRITON_INTERPRET": value},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        told.append(json.loads(done.stdout))

    assert told[0] == told[1]
    assert len(set(told[0].values())) > 1


def test_the_package_knows_its_tuner_without_importing_it() -> None:
    code = "import sys, lf_graph; assert 'lf_graph.tune' not in sys.modules; lf_graph.tune.stats"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lf_graph.nothing  # noqa: B018


def test_triton_kernels_have_a_hash_that_follows_their_helpers() -> None:
    pytest.importorskip("triton")
    from lf_graph import _adamw_triton
    from lf_graph.tune._source import _collect, _function

    seen: dict[str, str] = {}
    _collect(_function(_adamw_triton.update), seen)

    assert {"lf_graph._adamw_triton.update", "lf_graph._adamw_triton._advance"} <= set(seen)
    assert "lf_graph._adamw_triton._COEFFICIENTS" in seen
    assert not [name for name in seen if name.startswith("triton.") or "INTERPRETED" in name]
