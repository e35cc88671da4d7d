"""What Serve is told of a replica, and what it keeps of its log."""

import json
import logging
import logging.config
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from infra.settings import Settings
from models.serving import Serve
from services.config import ServiceConfig
from services.failures import VLLM_LOGGING
from services.replica import deployment, serve_log_kept


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


@pytest.mark.parametrize(("said", "target"), [({}, 8.0), ({"target_ongoing_requests": 3.0}, 3.0)])
def test_serve_scales_by_the_recipes_table_and_by_half_of_a_full_batch_if_that_says_no_target(
    tmp_path: Path, said: dict[str, Any], target: float
) -> None:
    scaling = {"min_replicas": 2, "max_replicas": 5, "upscale_delay_s": 7.0, "downscale_delay_s": 9.0}
    engine, settings = {"name": "vllm", "max_num_seqs": 16}, Settings(home=tmp_path)
    serve = Serve.model_validate({"autoscaling": {**scaling, **said}})
    config = ServiceConfig(target_dir=tmp_path, engine=engine, settings=settings, serve=serve)
    told = deployment(config, None)._bound_deployment._deployment_config.autoscaling_config
    assert told is not None
    wanted = {**scaling, "target_ongoing_requests": target}
    assert told.model_dump(include=wanted.keys()) == wanted
