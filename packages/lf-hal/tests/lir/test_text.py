"""The text form gives back the graph, and its parser answers every text with a graph or one typed error."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lir_graphs import graphs, sample, value

from lf_hal.lir import Constant, Graph, parse, to_text, verify
from lf_hal.lir.errors import LirSyntaxError

TEXT = to_text(sample())


def test_what_a_graph_looks_like() -> None:
    assert TEXT == (
        'graph "sample"\n'
        "input %x: f32[2,3,8,8]\n"
        "weight %conv.weight: f32[4,3,3,3]\n"
        "weight %bn.weight: f32[4]\n"
        "weight %bn.running_var: f32[4]\n"
        "const %shift: f32[4] = [0.5, -1.0, inf, 1e-45]\n"
        "recipe %bn.scale: f32[4] = batch_norm_scale(%bn.weight, %bn.running_var) {eps = 1e-05}\n"
        "%y: f32[2,4,8,8] = conv2d(%x, %conv.weight) "
        '{act = "none", dilation = [1, 1], groups = 1, padding = [1, 1], stride = [1, 1]} @mlu290\n'
        "%z: f32[2,4,8,8] = affine_channel(%y, %bn.scale, %shift)\n"
        '%t: f32[] = reduce(%z) {axes = [0, 1, 2, 3], fn = "sum", keepdim = false}\n'
        "output %z, %t\n"
    )


def test_the_sample_comes_back() -> None:
    assert parse(TEXT) == sample()


@given(graphs())
def test_every_graph_comes_back(graph: Graph) -> None:
    back = parse(to_text(graph))
    assert back == graph
    verify(back)


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", fullmatch=True)


@given(
    NAMES, NAMES, st.text(), st.lists(st.floats(allow_nan=False, width=32)), st.lists(st.integers(-128, 127))
)
@example("inf", "1e5-x", '"\\', [-0.0, float("-inf"), 1e-45], [-128])
@example("1.5", "true", "\ud800", [], [])
def test_names_strings_and_numbers_come_back(
    name: str, other: str, title: str, floats: list[float], whole: list[int]
) -> None:
    constants = [Constant(value(name, len(floats)), tuple(floats))]
    if other != name:
        constants.append(Constant(value(other, len(whole), dtype="i8"), tuple(whole)))
    graph = Graph(title, (), (), tuple(constants), (), (name,))
    back = parse(to_text(graph))
    assert back == graph
    assert repr(back) == repr(graph)  # -0.0 too
    verify(back)


def test_comments_blank_lines_and_carriage_returns() -> None:
    assert parse(TEXT.replace("\n", "  # said\r\n\r\n")) == sample()


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ("", 1, 1, "empty"),
        ("grape", 1, 1, "grape where graph should be"),
        ('graph "g" x', 1, 11, "x after the end"),
        ('graph "g', 1, 7, "'\"' begins nothing known"),
        ('graph "g"\ninput x: f32[]', 2, 7, "x where a value like %x should be"),
        ('graph "g"\ninput %x f32[]', 2, 10, "f32 where : should be"),
        ('graph "g"\ninput %x: f32[-1]', 2, 17, "a size is negative"),
        ('graph "g"\ninput %x: f32[1.0]', 2, 15, "no integer"),
        ('graph "g"\n\ninput %x: f32[', 3, 15, "the end where a number should be"),
        ('graph "g"\n%y: f32[] = relu(%x) {a = }', 2, 27, "} where a number should be"),
        ('graph "g"\noutput %y\noutput %y', 3, 1, "after output"),
        ('graph "g"\n\x00', 2, 1, "'\\x00' begins nothing known"),
        ('graph "g"\nconst %c: i64[1] = [' + "9" * 99 + "]", 2, 21, "a number of 99 digits"),
    ],
)
def test_a_fault_has_its_line_and_column(text: str, line: int, column: int, reason: str) -> None:
    with pytest.raises(LirSyntaxError) as e:
        parse(text)
    assert (e.value.line, e.value.column) == (line, column)
    assert reason in e.value.reason


def answers(text: str) -> None:
    fault = None
    try:
        graph = parse(text)
    except LirSyntaxError as e:
        fault = e
    else:
        assert parse(to_text(graph)) == graph
    if fault is not None:
        assert 1 <= fault.line <= text.count("\n") + 1
        assert fault.column >= 1


@given(st.text())
def test_every_text_has_an_answer(text: str) -> None:
    answers(text)


PIECES = [
    "graph ",
    '"g"',
    "\n",
    "%x",
    ": ",
    "f32",
    "[",
    "2",
    ",",
    "]",
    " = ",
    "relu",
    "(",
    ")",
    "{",
    "}",
    "@",
    "-",
    ".",
    "e",
    "const ",
    "inf",
    "true",
]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(lambda found: 'graph "g"\n' + "".join(found)))
def test_every_text_of_our_tokens_has_an_answer(text: str) -> None:
    answers(text)


@given(st.integers(0, len(TEXT)), st.integers(0, 20), st.text(max_size=3))
def test_every_damaged_text_has_an_answer(at: int, length: int, put: str) -> None:
    answers(TEXT[:at] + put + TEXT[at + length :])
