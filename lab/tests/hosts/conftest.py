"""Puts the helpers of the engine's own tests on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests" / "deep" / "engine"))
