"""`python -m fsdp_skip1` is `fsdp-skip1`."""

from __future__ import annotations

import sys

from fsdp_skip1.cli import main

if __name__ == "__main__":
    sys.exit(main())
