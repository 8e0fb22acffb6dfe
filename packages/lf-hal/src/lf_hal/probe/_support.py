"""Which package belongs to which torch and SDK, and which library to which installer: a table, and pure checks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

__all__ = ["fix_for", "missing_in", "sdk_too_old", "torch_for", "torch_mismatch"]

_LIBRARY = re.compile(r"([\w.+-]+\.so[\w.]*): cannot open shared object file")
_SYMBOL = re.compile(r"undefined symbol: ([\w@.]+)")
_SYMBOL_VERSION = re.compile(r"version [`']([\w.]+)' not found")
_MODULE = re.compile(r"No module named '([\w.]+)'")


@cache
def _table() -> dict[str, Any]:
    text = resources.files("lf_hal").joinpath("data/support.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def missing_in(text: str) -> tuple[str, ...]:
    """Libraries, symbols, symbol versions and modules that the error in `text` says were not found; each once."""
    found = [name for form in (_LIBRARY, _SYMBOL, _SYMBOL_VERSION, _MODULE) for name in form.findall(text)]
    return tuple(dict.fromkeys(found))


def fix_for(backend: str, missing: tuple[str, ...]) -> str:
    """What to do where these were not found: the SDK when one of its libraries or a symbol is missing."""
    entry = _table().get(backend)
    if entry is None:
        return ""
    of_sdk = any(name.startswith(tuple(entry["libraries"])) for name in missing)
    if of_sdk or any("." not in name for name in missing):
        return str(entry["fix"])
    return f"install again what {entry['package']} needs" if missing else ""


def torch_for(backend: str, package_version: str) -> str | None:
    """The torch release that this version of a backend's package is built for; None where its version does not say."""
    local = re.search(r"\+torch(\d+\.\d+\.\d+)", package_version)
    if local:
        return local[1]
    for row in _rows(backend):
        if row["package"] == package_version:
            return str(row["torch"])
    release = re.match(r"\d+\.\d+\.\d+", package_version)
    # torch_npu counts as torch does; torch_mlu has numbers of its own
    return release[0] if release and backend == "ascend" else None


def torch_mismatch(backend: str, versions: Mapping[str, str]) -> str:
    """Says that package and torch do not belong together; empty where they do, or where nobody knows."""
    entry = _table().get(backend)
    if entry is None or entry["package"] not in versions or "torch" not in versions:
        return ""
    package = entry["package"]
    wanted = torch_for(backend, versions[package])
    have = re.match(r"\d+\.\d+\.\d+", versions["torch"])
    if wanted is None or have is None or have[0] == wanted:
        return ""
    return f"{package} {versions[package]} is for torch {wanted}, and torch {versions['torch']} is installed"


def sdk_too_old(backend: str, versions: Mapping[str, str]) -> str:
    """Says that the SDK is older than the one this package was released with; empty where it is not, or unknown."""
    entry = _table().get(backend)
    if entry is None or entry["sdk"] not in versions or entry["package"] not in versions:
        return ""
    for row in _rows(backend):
        if row["package"] == versions[entry["package"]] and row["sdk"]:
            if _order(versions[entry["sdk"]]) < _order(row["sdk"]):
                return (
                    f"{entry['package']} {row['package']} was released with {entry['sdk']} {row['sdk']}, "
                    f"and {versions[entry['sdk']]} is installed"
                )
            return ""
    return ""


def _rows(backend: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _table().get(backend, {}).get("rows", [])
    return rows


def _order(version: str) -> tuple[int, ...]:
    """8.3.RC1 < 8.3.0 < 8.5.0: a release candidate counts before what it is a candidate of."""
    release = [int(n) for n in re.findall(r"\d+", re.split(r"(?i)\.?rc", version)[0])][:3]
    candidate = re.search(r"(?i)rc(\d+)", version)
    return (*release, *[0] * (3 - len(release)), int(candidate[1]) if candidate else 999)
