"""Saves, loads, checks, converts and lists checkpoints of models with quantized weights.

Built on torch.distributed.checkpoint, whose functions work too. layoutc adds atomic folders (complete or absent),
a check of every byte before a live model is written, and loads across precisions.
"""

from layoutc.checkpoint.as_stored import quantize_as_stored as quantize_as_stored
from layoutc.checkpoint.gguf.convert import convert_gguf as convert_gguf
from layoutc.checkpoint.gguf.convert import convert_to_gguf as convert_to_gguf
from layoutc.checkpoint.gguf.export import export_gguf as export_gguf
from layoutc.checkpoint.gguf.load import load_gguf as load_gguf
from layoutc.checkpoint.inspection import inspect as inspect
from layoutc.checkpoint.loading import load as load
from layoutc.checkpoint.safetensors.convert import convert_safetensors as convert_safetensors
from layoutc.checkpoint.safetensors.export import export_safetensors as export_safetensors
from layoutc.checkpoint.safetensors.load import load_safetensors as load_safetensors
from layoutc.checkpoint.safetensors.streaming import stream_export as stream_export
from layoutc.checkpoint.saving import async_save as async_save
from layoutc.checkpoint.saving import save as save
