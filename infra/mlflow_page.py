"""MLflow's page as an application for `infra.guard`, set up as `mlflow server` would: on the home's store and files."""

import os
from typing import Any

from infra.settings import load_settings


def app() -> Any:
    """Return the ASGI application; MLflow reads where its store is when it is imported."""
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    settings = load_settings()
    os.environ |= {BACKEND_STORE_URI_ENV_VAR: settings.mlflow_uri, ARTIFACT_ROOT_ENV_VAR: str(settings.mlflow_files)}
    from mlflow.server.fastapi_app import app as page

    return page
