"""Models of the tests beside this file; one thread in torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
