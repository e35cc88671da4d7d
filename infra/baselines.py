"""Where `make baselines` puts what redraft is compared with and does not run on."""

import sys
from importlib.metadata import distributions
from pathlib import Path

FOLDER = Path(sys.prefix) / "baselines"
# Has llama.cpp.
INTERPRETER = FOLDER / "bin" / "python"
# Apart from the rest, since a plug-in comes with them that every vLLM process would load.
SUFFIX_TREES = FOLDER / "suffix"
SUFFIX_PACKAGE = "arctic-inference"


def suffix_version() -> str | None:
    """Return the version of the suffix trees of vLLM, None if they are not there."""
    found = distributions(name=SUFFIX_PACKAGE, path=[str(SUFFIX_TREES)])
    return next((one.version for one in found), None)
