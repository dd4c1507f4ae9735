"""Models of Hugging Face's transformers, from a local folder: `model.factory = "hf:PATH"`."""

from mpitrain.models.hugging_face.build import build_hugging_face
from mpitrain.models.hugging_face.folder import PREFIX

__all__ = ["PREFIX", "build_hugging_face"]
