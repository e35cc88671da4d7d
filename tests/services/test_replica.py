"""What a replica does for the controller that looks after it."""

import json
import logging
import logging.config
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

from services.failures import VLLM_LOGGING
from services.replica import serve_log_kept


def test_serves_log_keeps_its_file_while_vllm_configures_logging(tmp_path: Path) -> None:
    file = RotatingFileHandler(tmp_path / "replica.log")
    handler = MemoryHandler(capacity=1, target=file)
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    try:
        with serve_log_kept(), open(VLLM_LOGGING["VLLM_LOGGING_CONFIG_PATH"]) as config:
            logging.config.dictConfig(json.load(config))
            assert handler.target is None
        logger.warning("taken over")
    finally:
        logger.removeHandler(handler)
        handler.close()
        file.close()
    assert (tmp_path / "replica.log").read_text() == "taken over\n"
