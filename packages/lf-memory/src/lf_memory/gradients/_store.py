"""Plans in files: found by key, checked in full, made anew when they do not fit."""

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ._errors import PlanError
from ._json import MOST_BYTES, from_text, to_text
from ._plan import Plan

SUFFIX = ".plan.json"


class Store:
    """One file, or a directory with a file per plan.

    Args:
        path: a directory (existing, or named with a trailing slash), or a file whose directory exists or can be made.
        rebuild: do not read what is there.
    """

    def __init__(self, path: Path | str, rebuild: bool = False) -> None:
        text = os.fspath(path)
        self._path, self._rebuild = Path(path), rebuild
        self._many = text.endswith(os.sep) or self._path.is_dir()

    def get(self, key: str, build: Callable[[], Plan]) -> Plan:
        """The stored plan with this key; else a new one, stored, whose `origin` says why."""
        path = self._path / f"{key[:32]}{SUFFIX}" if self._many else self._path
        try:
            return replace(self._read(path, key), origin=f"read from {path}")
        except PlanError as error:
            reason = str(error)
        plan = replace(build(), origin=f"made: {reason}")
        write_plan(path, plan)
        return plan

    def _read(self, path: Path, key: str) -> Plan:
        if self._rebuild:
            raise PlanError("asked to rebuild")
        plan = read_plan(path)
        if plan.key != key:
            raise PlanError(f"{path} holds the plan of another graph, policy or version of torch")
        return plan


def read_plan(path: Path | str) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: there is none, or it is damaged; `path` says which file.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            data = file.read(MOST_BYTES + 1) or b""
        return from_text(data)
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror})", path=str(path)) from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}", path=str(path)) from error


def _without_waiting(path: str, flags: int) -> int:
    """Open a pipe that nobody writes to as one that is empty; files are as ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_plan(path: Path | str, plan: Plan) -> None:
    """Write a plan so that the file is complete or as it was; what was there and is no plan is kept beside it.

    Raises:
        PlanError: the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _keep_foreign(target)
        with open(temporary, "xb") as file:
            file.write(to_text(plan).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise PlanError(
            f"{target} cannot be written ({error.strerror}): name another path", path=str(path)
        ) from error


def _keep_foreign(target: Path) -> None:
    """A damaged plan, or a file that never was one, is moved aside and not destroyed."""
    if not target.exists():
        return
    try:
        read_plan(target)
    except PlanError:
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            os.replace(target, target.with_name(target.name + ".bad"))
