"""The package without torch: it does not import it, and says what needs it."""

import subprocess
import sys

import pytest

NO_TORCH = "import sys; sys.modules['torch'] = None\n"  # as if it were not installed


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_importing_the_package_does_not_import_torch():
    result = run("import sys, lf_memory; from lf_memory import *; print('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stderr


def test_a_name_of_the_gradient_half_without_torch_says_what_to_install():
    result = run(
        NO_TORCH + "import lf_memory\ntry: lf_memory.predict\nexcept ImportError as error: print(error)"
    )
    assert "pip install lf-memory[torch]" in result.stdout, result.stderr


def test_an_unknown_name_is_an_attribute_error():
    import lf_memory

    with pytest.raises(AttributeError, match="no attribute 'predikt'"):
        lf_memory.predikt  # noqa: B018
