"""A task that is one only where a flow calls it."""

import subprocess
import sys


def test_outside_of_a_flow_a_task_is_a_function_and_prefect_stays_away() -> None:
    used = "import sys; from tasks.stages.task import task; assert task(len).fn('abc') == 3"
    code = f"{used}; assert 'prefect' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
