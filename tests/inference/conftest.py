"""The data on which runs are trained before they are used."""

from train.conftest import text  # noqa: F401
