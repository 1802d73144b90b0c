"""Makes `oracle` importable: test rooms are no packages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
