"""Loads, exports, converts and lists Hugging Face safetensors."""
