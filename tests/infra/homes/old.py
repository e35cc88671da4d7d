"""A home that an older release made, moved to a folder of the test."""

import sqlite3
import tarfile
from pathlib import Path

from infra.settings import Settings

FIRST = Path(__file__).parent / "first.tar.xz"
MADE_IN = "/home/user/.redraft"


def old_home(folder: Path) -> Settings:
    """Unpack it; what it says of its own place is said of the new one."""
    with tarfile.open(FIRST) as archive:
        archive.extractall(folder, filter="data")
    settings = Settings(home=folder / ".redraft")
    database = settings.home / "mlflow.db"
    with sqlite3.connect(database) as old:
        script = "\n".join(old.iterdump()).replace(MADE_IN, str(settings.home))
    old.close()
    for file in settings.home.glob("mlflow.db*"):
        file.unlink()
    with sqlite3.connect(database) as new:
        new.executescript(script)
    new.close()
    for file in settings.home.glob("service*.json"):
        file.write_text(file.read_text().replace(MADE_IN, str(settings.home)))
    return settings
