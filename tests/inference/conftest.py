"""The data that runs are trained on before they are used."""

from train.conftest import text  # noqa: F401
