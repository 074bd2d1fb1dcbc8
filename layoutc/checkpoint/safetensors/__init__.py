"""Hugging Face safetensors: loaded, exported, listed."""
