"""The import rules of the architecture: who may import which sibling, torch and triton."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIBLINGS = {
    "lf_format",
    "lf_memory",
    "lf_iouring",
    "lf_graph",
    "lf_comm",
    "lf_ckpt",
    "lf_hal",
    "lf_meta",
    "loongforge",
}
# package -> (siblings and torch/triton it may need, those it may use when they happen to be installed)
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "lf_format": (set(), set()),
    "lf_memory": (set(), {"torch"}),
    "lf_iouring": ({"lf_format", "lf_memory"}, {"torch"}),
    "lf_graph": ({"torch"}, {"triton"}),
    "lf_comm": ({"torch"}, set()),
    "lf_ckpt": ({"torch"}, {"lf_memory", "lf_iouring"}),
    "lf_hal": (set(), {"torch", "lf_ckpt"}),
    "lf_meta": (
        {"lf_format", "lf_memory", "lf_iouring", "lf_graph", "lf_comm", "lf_ckpt", "lf_hal", "torch"},
        set(),
    ),
}
# subpackages that need more, which an extra brings; their package imports them lazily
HALVES = {"lf_memory/gradients": {"torch"}}
WATCHED = SIBLINGS | {"torch", "triton"}
PACKAGES = sorted(p.parent for p in ROOT.glob("packages/*/pyproject.toml"))


def _roots(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import):
        return {a.name.split(".")[0] for a in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return {node.module.split(".")[0]}
    return set()


def imports_of(source: str) -> tuple[set[str], set[str]]:
    """(names imported whenever the module is, names imported lazily, in a try, or for typing only)."""
    always: set[str] = set()
    sometimes: set[str] = set()

    def visit(node: ast.AST, conditional: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                (sometimes if conditional else always).update(_roots(child))
            lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try, ast.If))
            visit(child, conditional or lazy)

    visit(ast.parse(source), False)
    return always, sometimes


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_package_imports_only_what_its_line_allows(package: Path) -> None:
    name = package.name.replace("-", "_")
    needed, optional = ALLOWED[name]
    for path in sorted((package / "src").rglob("*.py")):
        always, sometimes = imports_of(path.read_text(encoding="utf-8"))
        own = {name, "loongforge"} if name == "lf_meta" else {name}
        half = HALVES.get(path.parent.relative_to(package / "src").as_posix(), set())
        assert (always & WATCHED) - own <= needed | half, f"{path} imports {always & WATCHED}"
        assert (sometimes & WATCHED) - own <= needed | optional, f"{path} may import {sometimes & WATCHED}"


def test_the_rule_notices_a_forbidden_import() -> None:
    always, sometimes = imports_of("import torch.nn\ndef f():\n    from lf_meta import cli\n")
    assert always == {"torch"}
    assert sometimes == {"lf_meta"}


def _project(package: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return project


def test_all_packages_share_one_version_and_pin_siblings_to_it() -> None:
    versions = {p.name: _project(p)["version"] for p in PACKAGES}
    assert len(set(versions.values())) == 1, versions
    for package in PACKAGES:
        requirements = _project(package)["dependencies"]
        assert isinstance(requirements, list)
        for requirement in requirements:
            if requirement.startswith("lf-"):
                assert re.fullmatch(r"lf-\w+>=0\.1,<0\.2", requirement), f"{package.name}: {requirement}"


def test_modules_report_the_version_of_their_package() -> None:
    for package in PACKAGES:
        init = package / "src" / package.name.replace("-", "_") / "__init__.py"
        found = re.search(r'^__version__ = "(.+)"', init.read_text(), re.MULTILINE)
        assert found, f"{init} has no __version__"
        assert found[1] == _project(package)["version"]


@pytest.mark.parametrize("name", ["hatch_build.py", "tests/warm_server.py"])
def test_copies_are_of_one_file(name: str) -> None:
    """Packages stand alone, also in building and testing."""
    copies = [p.read_bytes() for p in ROOT.glob(f"packages/*/{name}")]
    assert len(set(copies)) == 1


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_package_carries_the_license_that_its_wheel_takes_along(package: Path) -> None:
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_package_is_complete(package: Path) -> None:
    source = package / "src" / package.name.replace("-", "_")
    for needed in [package / "README.md", source / "py.typed", source / "__init__.py", package / "tests"]:
        assert needed.exists(), needed
    assert "__all__" in (source / "__init__.py").read_text()
