"""`python -m lf_ckpt.cli`."""

import sys

from . import main

sys.exit(main())
