"""The interpreter's shortcut gives back what a launch replaced, and replaces it again for the next."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
interpreter = pytest.importorskip("triton.runtime.interpreter")


def test_a_launch_replaces_builtins_and_takes_them_back() -> None:
    from lf_graph.kernels import gelu_tanh

    language = interpreter.tl
    x = torch.randn(3, 8)
    load, seen = language.load, []
    assert language.core.is_builtin(load)
    set_grid = interpreter.interpreter_builder.set_grid_idx

    def note(*index: int) -> None:
        seen.append(language.core.is_builtin(language.load))
        set_grid(*index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.interpreter_builder, "set_grid_idx", note)
        results = [gelu_tanh(x, implementation="triton") for _ in range(2)]
    assert seen
    assert not any(seen)
    assert language.load is load
    assert torch.equal(*results)


def test_helpers_do_not_walk_the_language_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from lf_graph.kernels import gelu_tanh

    x, walks = torch.randn(40, 600), []
    patch_builtin = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda *args: (walks.append(args[0]), patch_builtin(*args))[1]
    )
    gelu_tanh(x, implementation="triton")
    few = len(walks)
    walks.clear()
    gelu_tanh(x.repeat(8, 1), implementation="triton")  # eight times the programs, one launch
    assert 0 < len(walks) <= few
