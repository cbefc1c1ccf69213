"""Reading the settings of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel

from bench.errors import UnavailableError

Model = TypeVar("Model", bound=BaseModel)


def read_settings(model: type[Model], path: Path) -> Model:
    """Reads and checks a YAML file.

    Raises:
        UnavailableError: The file holds an unknown key or an impossible value.
    """
    try:
        return model.model_validate(yaml.safe_load(path.read_text()))
    except ValueError as error:  # pydantic's error is one
        raise UnavailableError(f"{path.name}: {error}") from error
