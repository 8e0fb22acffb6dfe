"""Execute every fenced ``python`` block of the READMEs, each file's blocks in one fresh process and folder.

Two files at a time: most of an example is one thread that imports torch.
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(readme: Path) -> bool:
    """Run one README; True when its examples ended without an error."""
    code = "\n".join(BLOCK.findall(readme.read_text(encoding="utf-8")))
    if not code:
        print(f"{readme.relative_to(ROOT)}: no python example")
        return True
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "readme.py"  # a file, because spawned processes import it
        script.write_text(code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=300
        )
    said = done.stdout + done.stderr if done.returncode else ""
    print(f"{readme.relative_to(ROOT)}: {'FAILED' if done.returncode else 'ok'}\n{said}", end="", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md")])))
    sys.exit(0 if all(results) else 1)
