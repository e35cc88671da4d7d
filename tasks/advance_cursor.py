"""Say that a window is done with.

It comes last: until then, a crash only makes the same window be claimed again. After three it is set aside.
"""

from infra.captured import CapturedFiles
from infra.querylog import QueryLog
from infra.settings import load_settings
from infra.windows import Window
from tasks.stages.reporting import run_logger
from tasks.stages.task import task


@task
def advance_cursor(window: Window) -> None:
    """Move the query log's cursor past a claimed window, and let go of hidden states captured of rows before it."""
    log = QueryLog(load_settings().querylog)
    log.windows.commit(window)
    CapturedFiles(log.path).forget(log.ids(window.last_seq))
    run_logger().info("the cursor is at %d", window.last_seq)
