"""What a chain says of the values between its elements, on a vision-language-action shape of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lf_graph import Chain, ClosedError, Eager, Edge, Piece

WIDTH = 8


def vision_language_action(outputs: tuple[str, ...] = ("action",)) -> Chain:
    """Image features go to language and action; language goes to action by way of ordinary code."""
    torch.manual_seed(0)
    vision, language, action = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    vision.requires_grad_(False)

    def read(features: Tensor, words: Tensor) -> Tensor:
        result: Tensor = language(features + words)
        return result

    def act(features: Tensor, context: Tensor) -> Tensor:
        result: Tensor = action(features * context)
        return result

    return Chain(
        [
            Piece(vision, ("image",), ("features",), name="vision"),
            Piece(read, ("features", "words"), ("hidden",), name="language"),
            Eager(lambda h: h / max(1.0, h.abs().max().item()), ("hidden",), ("context",), name="scale"),
            Piece(act, ("features", "context"), ("action",), name="action"),
        ],
        ("image", "words"),
        outputs,
    )


def captured(outputs: tuple[str, ...] = ("action",)) -> dict[str, Edge]:
    chain = vision_language_action(outputs).capture(torch.randn(3, WIDTH), torch.randn(3, WIDTH))
    return {edge.name: edge for edge in chain.edges()}


def test_edges_come_in_the_order_in_which_they_are_made() -> None:
    assert list(captured()) == ["image", "words", "features", "hidden", "context", "action"]


def test_a_value_lives_from_who_makes_it_to_the_last_who_takes_it() -> None:
    edges = captured()

    features = edges["features"]
    assert (features.made_by, features.used_by) == ("vision", ("language", "action"))
    assert (features.first, features.last, features.returned) == (0, 3, False)
    assert (edges["image"].made_by, edges["image"].first, edges["image"].last) == ("", -1, 0)
    assert (edges["hidden"].first, edges["hidden"].last) == (1, 2)


def test_what_a_call_returns_lives_to_its_end() -> None:
    edges = captured(("action", "features"))

    assert (edges["action"].last, edges["action"].returned, edges["action"].used_by) == (4, True, ())
    assert (edges["features"].last, edges["features"].returned) == (4, True)


def test_a_gradient_comes_back_only_along_what_depends_on_trained_weights() -> None:
    assert {name for name, edge in captured().items() if edge.gradient} == {"hidden", "context", "action"}


def test_values_have_a_place_and_bytes() -> None:
    assert {edge.nbytes for edge in captured().values()} == {3 * WIDTH * 4}
    assert captured()["features"].dtype is torch.float32


def test_a_value_of_eager_code_for_eager_code_has_no_place() -> None:
    chain = Chain([Eager(lambda x: x + 1), Eager(lambda x: x * 2), Piece(nn.Linear(WIDTH, WIDTH))])
    chain.capture(torch.randn(3, WIDTH))

    _, between, given, _ = chain.edges()

    assert (between.shape, between.dtype, between.nbytes) == (None, None, 0)
    assert given.shape == (3, WIDTH)


def test_every_value_is_made_once_in_a_call() -> None:
    chain = vision_language_action()
    sample = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    chain.capture(*sample)
    before = chain.stats()

    chain(*sample).sum().backward()

    products = sum(len(e.outputs) for e in chain.elements if isinstance(e, Piece))
    assert len({e.name for e in chain.edges() if e.made_by in ("vision", "language", "action")}) == products
    assert chain.stats().replays - before.replays == chain.stats().graphs


def test_there_are_none_before_a_capture_and_behind_the_end() -> None:
    chain = vision_language_action()
    with pytest.raises(ClosedError):
        chain.edges()
    chain.capture(torch.randn(3, WIDTH), torch.randn(3, WIDTH)).close()
    with pytest.raises(ClosedError):
        chain.edges()
