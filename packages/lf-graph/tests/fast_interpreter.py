"""Triton's interpreter without the work that it repeats: a third of the time of the kernel tests.

Up to Triton 3.9 every call of a helper by a kernel walks ``triton.language`` and replaces its builtins
(``InterpretedFunction.__call__``). The launch of that kernel has done so already, and takes it back when it ends.
"""

from __future__ import annotations

from typing import Any


def patch_once_a_launch() -> None:
    """Replaces the builtins of each set of modules once in a launch; nothing is done where Triton works otherwise."""
    from triton.runtime import interpreter

    executor, patch = getattr(interpreter, "GridExecutor", None), getattr(interpreter, "_patch_lang", None)
    if executor is None or patch is None:
        return
    launch, done = executor.__call__, set()
    language = (interpreter.tl, interpreter.tl.core)

    def patch_lang(fn: Any) -> Any:
        modules = frozenset(id(m) for m in fn.__globals__.values() if any(m is known for known in language))
        if modules in done:
            return None  # only a launch asks for what it is to take back, and it is the first
        done.add(modules)
        return patch(fn)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        done.clear()
        return launch(self, *arguments, **options)

    interpreter._patch_lang, executor.__call__ = patch_lang, call
