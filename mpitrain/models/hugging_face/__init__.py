"""Models of Hugging Face's transformers, from a local folder: `model.factory = "hf:PATH"`."""

from mpitrain.models.hugging_face.folder import PREFIX, build_hugging_face

__all__ = ["PREFIX", "build_hugging_face"]
